/** The frame of a plot: conversion between numbers and pixels, ticks and grid lines. */

import { s } from "./dom";
import { roundUp } from "./numbers";

export interface Range {
  low: number;
  high: number;
}

/** About `count` round numbers in a range. */
export function ticks({ low, high }: Range, count: number): number[] {
  const step = roundUp((high - low) / Math.max(count, 1));
  const out: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    out.push(Number((i * step).toPrecision(12)));
  }
  return out;
}

/** The range of some numbers, extended by a margin. */
export function around(numbers: number[], more = 0.06): Range {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const margin = (high - low || Math.abs(low) || 1) * more;
  return { low: low - margin, high: high + margin };
}

/** A round number as it is written on an axis. */
export function said(x: number): string {
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
  atX(pixel: number): number;
  atY(pixel: number): number;
}

export interface Size {
  width: number;
  height: number;
  margin?: { left?: number; right?: number; top?: number; bottom?: number };
}

export function frame({ width, height, margin = {} }: Size, x: Range, y: Range): Frame {
  const left = margin.left ?? 48;
  const right = Math.max(width - (margin.right ?? 12), left + 1);
  const top = margin.top ?? 12;
  const bottom = Math.max(height - (margin.bottom ?? 40), top + 1);
  const [wide, high] = [(right - left) / (x.high - x.low), (bottom - top) / (y.high - y.low)];
  return {
    left,
    right,
    top,
    bottom,
    x: (value) => left + (value - x.low) * wide,
    y: (value) => bottom - (value - y.low) * high,
    atX: (pixel) => x.low + (pixel - left) / wide,
    atY: (pixel) => y.low + (bottom - pixel) / high,
  };
}

/** Ticks with their numbers, and the names of the axes. */
export function axes(of: Frame, x: Range, y: Range, names: { x: string; y: string }): SVGElement[] {
  const out: SVGElement[] = [];
  for (const value of ticks(x, (of.right - of.left) / 80)) {
    const at = of.x(value);
    out.push(
      s("line", { class: "grid", x1: at, x2: at, y1: of.top, y2: of.bottom }),
      s("text", { class: "tick", x: at, y: of.bottom + 17, "text-anchor": "middle" }, said(value)),
    );
  }
  for (const value of ticks(y, (of.bottom - of.top) / 36)) {
    const at = of.y(value);
    out.push(
      s("line", { class: "grid", x1: of.left, x2: of.right, y1: at, y2: at }),
      s("text", { class: "tick", x: of.left - 8, y: at + 4, "text-anchor": "end" }, said(value)),
    );
  }
  out.push(
    s("text", { class: "axis", x: of.right, y: of.bottom + 34, "text-anchor": "end" }, names.x),
    s("text", { class: "axis", x: of.left + 6, y: of.top + 12 }, names.y),
  );
  return out;
}

/** A line through points, interrupted where y is not a number. */
export function path(points: [number, number][]): string {
  let out = "";
  let down = false;
  for (const [x, y] of points) {
    if (Number.isFinite(y)) out += `${down ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`;
    down = Number.isFinite(y);
  }
  return out;
}
