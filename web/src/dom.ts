// Elements from values. Texts become text nodes, never markup.
import { visible } from "./format";

export type Child = Node | string | number | null | undefined | false;
export type Attributes = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;

const SVG = "http://www.w3.org/2000/svg";
let ids = 0;

export function freshId(prefix: string): string {
  return `${prefix}-${++ids}`;
}

function dress<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, ...children);
  return element;
}

export function append(element: Element, ...children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return dress(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return dress(document.createElementNS(SVG, tag), attributes, children);
}

/** A text from data: control characters shown, direction isolated. */
export function userText(text: string, className?: string): HTMLElement {
  return el("bdi", { class: className }, visible(text));
}

/** A name from data, which may break after its separators rather than inside a word. */
export function nameText(text: string): HTMLElement {
  const parts = visible(text).split(/(?<=[_/.\-])(?=[^_/.\-])/);
  return el("bdi", {}, ...parts.flatMap((part, index) => (index ? [el("wbr"), part] : [part])));
}

/** A box in which a wide picture scrolls by itself; the keyboard reaches it. */
export function sideways(label: string, ...children: Child[]): HTMLElement {
  return el("div", { class: "scroll-x", tabindex: 0, role: "group", "aria-label": label }, ...children);
}

/** Sentences from data, as paragraphs of one list. */
export function sentences(texts: string[], className = "sentences"): HTMLElement | null {
  if (!texts.length) return null;
  return el("ul", { class: className }, ...texts.map((text) => el("li", {}, userText(text))));
}

export function replace(element: Element, ...children: Child[]): void {
  element.replaceChildren();
  append(element, ...children);
}
