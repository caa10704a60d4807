/** The frame of a plot: conversion between numbers and pixels, ticks and grid lines. */

import { s } from "./dom";
import { roundUp } from "./numbers";

export interface Range {
  low: number;
  high: number;
}

/** About `count` round numbers in a range. */
export function computeTicks({ low, high }: Range, count: number): number[] {
  const step = roundUp((high - low) / Math.max(count, 1));
  const out: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    out.push(Number((i * step).toPrecision(12)));
  }
  return out;
}

/** The range of some numbers, extended by a margin. */
export function computeRange(numbers: number[], relativeMargin = 0.06): Range {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const margin = (high - low || Math.abs(low) || 1) * relativeMargin;
  return { low: low - margin, high: high + margin };
}

/** A round number as it is written on an axis. */
export function formatTick(x: number): string {
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

export interface Frame {
  left: number;
  right: number;
  top: number;
  bottom: number;
  x(value: number): number;
  y(value: number): number;
  /** The inverse functions. */
  invertX(pixel: number): number;
  invertY(pixel: number): number;
}

export interface Size {
  width: number;
  height: number;
  margin?: { left?: number; right?: number; top?: number; bottom?: number };
}

export function createFrame({ width, height, margin = {} }: Size, x: Range, y: Range): Frame {
  const left = margin.left ?? 48;
  const right = Math.max(width - (margin.right ?? 12), left + 1);
  const top = margin.top ?? 12;
  const bottom = Math.max(height - (margin.bottom ?? 40), top + 1);
  const [xScale, yScale] = [(right - left) / (x.high - x.low), (bottom - top) / (y.high - y.low)];
  return {
    left,
    right,
    top,
    bottom,
    x: (value) => left + (value - x.low) * xScale,
    y: (value) => bottom - (value - y.low) * yScale,
    invertX: (pixel) => x.low + (pixel - left) / xScale,
    invertY: (pixel) => y.low + (bottom - pixel) / yScale,
  };
}

/** Ticks with their numbers, and the names of the axes. */
export function createAxes(frame: Frame, x: Range, y: Range, names: { x: string; y: string }): SVGElement[] {
  const out: SVGElement[] = [];
  for (const value of computeTicks(x, (frame.right - frame.left) / 80)) {
    const pixel = frame.x(value);
    out.push(
      s("line", { class: "grid", x1: pixel, x2: pixel, y1: frame.top, y2: frame.bottom }),
      s("text", { class: "tick", x: pixel, y: frame.bottom + 17, "text-anchor": "middle" }, formatTick(value)),
    );
  }
  for (const value of computeTicks(y, (frame.bottom - frame.top) / 36)) {
    const pixel = frame.y(value);
    out.push(
      s("line", { class: "grid", x1: frame.left, x2: frame.right, y1: pixel, y2: pixel }),
      s("text", { class: "tick", x: frame.left - 8, y: pixel + 4, "text-anchor": "end" }, formatTick(value)),
    );
  }
  out.push(
    s("text", { class: "axis", x: frame.right, y: frame.bottom + 34, "text-anchor": "end" }, names.x),
    s("text", { class: "axis", x: frame.left + 6, y: frame.top + 12 }, names.y),
  );
  return out;
}

/** A line through points, interrupted where y is not a number. */
export function formatPath(points: [number, number][]): string {
  let out = "";
  let isDrawing = false;
  for (const [x, y] of points) {
    if (Number.isFinite(y)) out += `${isDrawing ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`;
    isDrawing = Number.isFinite(y);
  }
  return out;
}
