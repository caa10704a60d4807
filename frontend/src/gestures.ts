/** What hands do on a canvas: hover, drag, pinch, wheel and keys, in its CSS pixels. */

interface Point {
  x: number;
  y: number;
}

export interface Gestures {
  hover(x: number, y: number): void;
  /** The pointer has gone, and the keys are not here either. */
  leave(): void;
  /** What lies under the pointer goes with it. */
  drag(x: number, y: number): void;
  /** Larger or smaller about a point. */
  scale(factor: number, x: number, y: number): void;
  /** Whether the key means something here. */
  press(key: string, shift: boolean): boolean;
}

/** Pixels that a pointer moves before it drags. */
const STILL = 4;

export function gestures(canvas: HTMLCanvasElement, to: Gestures) {
  const pointers = new Map<number, Point>();
  let dragged = false;
  const place = (event: MouseEvent): Point => {
    const { left, top } = canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    dragged = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) return to.hover(now.x, now.y);
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    const moved = Math.hypot(now.x - before.x, now.y - before.y);
    if (!other && !dragged && moved < STILL) return;
    dragged = true;
    pointers.set(event.pointerId, now);
    if (other) {
      const apart = (p: Point) => Math.hypot(p.x - other.x, p.y - other.y);
      to.scale(apart(now) / (apart(before) || 1), (now.x + other.x) / 2, (now.y + other.y) / 2);
    } else to.drag(now.x - before.x, now.y - before.y);
  });
  for (const name of ["pointerup", "pointercancel"] as const) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (name === "pointerup" && !dragged) to.hover(place(event).x, place(event).y);
    });
  }
  canvas.addEventListener("pointerleave", () => {
    if (!pointers.size && !canvas.matches(":focus")) to.leave();
  });
  canvas.addEventListener("blur", () => to.leave());
  canvas.addEventListener("dblclick", (event) => to.scale(2, place(event).x, place(event).y));
  // A bare wheel scrolls the page; a pinch on a pad comes as a wheel with Ctrl.
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    to.scale(Math.exp(-event.deltaY / 200), place(event).x, place(event).y);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!event.altKey && !event.ctrlKey && !event.metaKey && to.press(event.key, event.shiftKey))
      event.preventDefault();
  });
}
