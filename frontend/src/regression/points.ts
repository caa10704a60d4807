/** Example points. */

import type { Point } from "../equation";

export interface Example {
  name: string;
  x: string;
  y: string;
  points: Point[];
  bandwidth?: number;
  query?: number;
}

/** Reproducible noise: the sum of twelve numbers between 0 and 1, minus 6. */
function createNoise(seed: number): () => number {
  let state = seed;
  const nextUniform = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  return () => Array.from({ length: 12 }, nextUniform).reduce((a, b) => a + b, -6);
}

function samplePoints(count: number, xMax: number, curve: (x: number) => number, noiseSize: number): Point[] {
  const nextNoise = createNoise(14);
  return Array.from({ length: count }, (_, i) => {
    const x = (xMax * (i + 0.5)) / count + 0.25 * (xMax / count) * nextNoise();
    const round = (y: number) => Number(y.toFixed(2));
    return { x: round(Math.min(Math.max(x, 0), xMax)), y: round(curve(x) + noiseSize * nextNoise()) };
  });
}

export const EXAMPLES: Example[] = [
  {
    name: "2 sin x + x",
    x: "x",
    y: "y",
    points: samplePoints(30, 5, (x) => 2 * Math.sin(x) + x, 0.5),
    bandwidth: 0.35,
    query: 2,
  },
  {
    name: "GPA → salary",
    x: "GPA",
    y: "salary, thousands",
    points: [
      [2.4, 51], [2.6, 56], [2.7, 54], [2.9, 58], [3.0, 61], [3.1, 60], [3.2, 66], [3.3, 65], [3.4, 70],
      [3.45, 69], [3.5, 73], [3.6, 77], [3.7, 76], [3.8, 84], [3.9, 88], [4.0, 95],
    ].map(([x, y]) => ({ x, y })),
    bandwidth: 0.15,
    query: 3.5,
  }, // prettier-ignore
  {
    name: "A step",
    x: "x",
    y: "y",
    points: samplePoints(24, 4, (x) => (x < 2 ? 0 : 1), 0.08),
    bandwidth: 0.3,
    query: 2,
  },
];
