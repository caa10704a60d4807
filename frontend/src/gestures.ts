/** Input on a canvas: hover, drag, pinch, wheel and keys. Coordinates are CSS pixels of the canvas. */

interface Point {
  x: number;
  y: number;
}

export interface GestureHandlers {
  hover(x: number, y: number): void;
  /** The pointer left the canvas, and the canvas does not have the focus. */
  leave(): void;
  /** Move the content by this distance. */
  drag(x: number, y: number): void;
  /** Zoom by a factor about a point. */
  scale(factor: number, x: number, y: number): void;
  /** Handle a key; return whether it was used. */
  press(key: string, shift: boolean): boolean;
}

/** Pixels that a pointer must move before a drag starts. */
const DRAG_THRESHOLD_PIXELS = 4;

/** Call the handlers for the input on a canvas. */
export function addGestures(canvas: HTMLCanvasElement, handlers: GestureHandlers) {
  const pointers = new Map<number, Point>();
  let dragged = false;
  const getPosition = (event: MouseEvent): Point => {
    const { left, top } = canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, getPosition(event));
    dragged = false;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = getPosition(event);
    const before = pointers.get(event.pointerId);
    if (!before) return handlers.hover(now.x, now.y);
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    const moved = Math.hypot(now.x - before.x, now.y - before.y);
    if (!other && !dragged && moved < DRAG_THRESHOLD_PIXELS) return;
    dragged = true;
    pointers.set(event.pointerId, now);
    if (other) {
      const getDistance = (p: Point) => Math.hypot(p.x - other.x, p.y - other.y);
      handlers.scale(getDistance(now) / (getDistance(before) || 1), (now.x + other.x) / 2, (now.y + other.y) / 2);
    } else handlers.drag(now.x - before.x, now.y - before.y);
  });
  for (const name of ["pointerup", "pointercancel"] as const) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (name === "pointerup" && !dragged) handlers.hover(getPosition(event).x, getPosition(event).y);
    });
  }
  canvas.addEventListener("pointerleave", () => {
    if (!pointers.size && !canvas.matches(":focus")) handlers.leave();
  });
  canvas.addEventListener("blur", () => handlers.leave());
  canvas.addEventListener("dblclick", (event) => handlers.scale(2, getPosition(event).x, getPosition(event).y));
  // A wheel without Ctrl scrolls the page. Browsers report a pinch on a touchpad as Ctrl + wheel.
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    handlers.scale(Math.exp(-event.deltaY / 200), getPosition(event).x, getPosition(event).y);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!event.altKey && !event.ctrlKey && !event.metaKey && handlers.press(event.key, event.shiftKey))
      event.preventDefault();
  });
}
