// Figures as files: the SVG with its computed styles written into it, and a PNG of it at twice the size.
import { symbol, symbolCircle, symbolDiamond2, symbolSquare, symbolTimes, symbolTriangle, type SymbolType } from "d3";
import { el, svg } from "./dom";
import { fileName, visible } from "./format";

const KEPT = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-opacity",
  "stroke-linecap",
  "stroke-linejoin",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "font-style",
  "font-variant-numeric",
  "text-anchor",
  "dominant-baseline",
  "visibility",
  "display",
  "paint-order",
  "letter-spacing",
  "mix-blend-mode",
];
const DEFAULTS: Record<string, string> = {
  "fill-opacity": "1",
  "stroke-opacity": "1",
  opacity: "1",
  visibility: "visible",
  display: "inline",
  stroke: "none",
  "stroke-dasharray": "none",
  "stroke-linecap": "butt",
  "stroke-linejoin": "miter",
  "letter-spacing": "normal",
  "font-style": "normal",
  "mix-blend-mode": "normal",
  "paint-order": "normal",
  "font-variant-numeric": "normal",
};

const SYMBOLS: Record<string, SymbolType> = {
  circle: symbolCircle,
  square: symbolSquare,
  triangle: symbolTriangle,
  diamond2: symbolDiamond2,
  times: symbolTimes,
};

export interface LegendEntry {
  name: string;
  colour: string;
  dash?: string;
  /** A point instead of a line. */
  symbol?: "circle" | "square" | "triangle" | "diamond2" | "times";
  /** Only the outline of the point. */
  hollow?: boolean;
}

export interface Picture {
  title: string;
  name: string;
  /** What it shows at the moment: the run, the series. A line below the title, and a part of the file's name. */
  subject?: () => string[];
  legend?: () => LegendEntry[];
  svg: () => SVGSVGElement | null;
}

/** Where a figure refers to one of its own parts, as "url(#id)", whatever the page made of it. */
function localReference(value: string | null): string | null {
  const id = /url\(\s*["']?[^"')]*#([^"')]+)["']?\s*\)/.exec(value ?? "")?.[1];
  return id ? `url(#${id})` : null;
}

function inlineStyles(source: Element, copy: Element): void {
  if (source instanceof SVGClipPathElement) return; // as it is: its id, and shapes whose styles do not matter
  const computed = getComputedStyle(source);
  const texts = source instanceof SVGTextElement || source instanceof SVGTSpanElement;
  const rules: string[] = [];
  for (const name of KEPT) {
    if (!texts && /^(font|text|dominant|letter)/.test(name) && !(source instanceof SVGSVGElement)) continue;
    const value = computed.getPropertyValue(name);
    if (value && value !== DEFAULTS[name]) rules.push(`${name}:${value}`);
  }
  for (const name of [...copy.getAttributeNames()]) {
    if (/^(class|data-|aria-|tabindex|id$|role)/.test(name)) copy.removeAttribute(name);
  }
  copy.setAttribute("style", rules.join(";"));
  const clip = localReference(source.getAttribute("clip-path") ?? computed.getPropertyValue("clip-path"));
  if (clip) copy.setAttribute("clip-path", clip);
  const children = [...source.children];
  [...copy.children].forEach((child, index) => {
    const original = children[index];
    if (original && child instanceof SVGElement) inlineStyles(original, child);
  });
}

function colourOf(variable: string): string {
  const probe = el("span", { style: `color:${variable}` });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

function legendMark(entry: LegendEntry, x: number, y: number): SVGElement {
  const colour = colourOf(entry.colour);
  const shape = entry.symbol && SYMBOLS[entry.symbol];
  if (!shape) {
    const line = `stroke:${colour};stroke-width:2.5;stroke-dasharray:${entry.dash || "none"}`;
    return svg("line", { x1: x, x2: x + 22, y1: y - 4, y2: y - 4, style: line });
  }
  const outline = entry.hollow || entry.symbol === "times";
  const style = outline ? `fill:none;stroke:${colour};stroke-width:1.6` : `fill:${colour}`;
  return svg("path", { d: symbol(shape, 70)() ?? "", transform: `translate(${x + 15},${y - 4})`, style });
}

function heading(picture: Picture, width: number): { nodes: SVGElement[]; height: number } {
  const ink = colourOf("var(--ink)");
  const font = "font-family:system-ui,sans-serif";
  const nodes: SVGElement[] = [
    svg("text", { x: 12, y: 24, style: `${font};font-size:15px;font-weight:600;fill:${ink}` }, visible(picture.title)),
  ];
  let x = 12;
  let y = 46;
  const subject = (picture.subject?.() ?? []).filter(Boolean).map(visible).join(" · ");
  if (subject) {
    const style = `${font};font-size:12px;fill:${ink};unicode-bidi:isolate`;
    const room = Math.max(20, Math.floor((width - 24) / 6.2));
    for (const line of wrapped(subject, room)) {
      nodes.push(svg("text", { x: 12, y: y - 4, style }, line));
      y += 16;
    }
    y += 4;
  }
  const top = y;
  for (const entry of picture.legend?.() ?? []) {
    const name = visible(entry.name);
    const length = 42 + 7 * name.length;
    if (x > 12 && x + length > width) [x, y] = [12, y + 18];
    nodes.push(legendMark(entry, x, y));
    nodes.push(svg("text", { x: x + 28, y, style: `${font};font-size:12px;fill:${ink};unicode-bidi:isolate` }, name));
    x += length;
  }
  return { nodes, height: (picture.legend?.().length ?? 0) > 0 ? y + 12 : top - 10 };
}

function wrapped(text: string, room: number): string[] {
  const rows: string[] = [""];
  for (const word of text.split(" ")) {
    const last = rows.at(-1)!;
    if (last && last.length + word.length + 1 > room) rows.push(word);
    else rows[rows.length - 1] = last ? `${last} ${word}` : word;
  }
  return rows;
}

function nameOf(picture: Picture): string {
  return fileName(picture.name, ...(picture.subject?.() ?? []));
}

/** The figure with title and legend as one standalone SVG. */
export function standalone(picture: Picture): { text: string; width: number; height: number } | null {
  const source = picture.svg();
  if (!source) return null;
  const box = source.viewBox.baseVal;
  const width = box?.width || source.clientWidth || 640;
  const height = box?.height || source.clientHeight || 400;
  const copy = source.cloneNode(true) as SVGSVGElement;
  inlineStyles(source, copy);
  copy.querySelectorAll("style").forEach((style) => style.remove());
  const top = heading(picture, width);
  copy.setAttribute("y", String(top.height));
  copy.setAttribute("width", String(width));
  copy.setAttribute("height", String(height));
  const total = top.height + height + 8;
  const whole = svg("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height: total,
    viewBox: `0 0 ${width} ${total}`,
  });
  whole.append(svg("rect", { width, height: total, style: `fill:${colourOf("var(--card)")}` }), ...top.nodes, copy);
  return { text: new XMLSerializer().serializeToString(whole), width, height: total };
}

function save(blob: Blob, name: string): void {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function savePng(picture: Picture): void {
  const made = standalone(picture);
  if (!made) return;
  const image = new Image();
  image.onload = () => {
    const canvas = el("canvas", { width: Math.ceil(2 * made.width), height: Math.ceil(2 * made.height) });
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => blob && save(blob, `${nameOf(picture)}.png`), "image/png");
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(made.text)}`;
}

function saveSvg(picture: Picture): void {
  const made = standalone(picture);
  if (made) save(new Blob([made.text], { type: "image/svg+xml" }), `${nameOf(picture)}.svg`);
}

export function downloadButtons(picture: Picture): HTMLElement {
  const make = (format: string, press: () => void): HTMLElement =>
    el(
      "button",
      {
        type: "button",
        class: "tiny",
        "data-test": `download-${format.toLowerCase()}`,
        onclick: press,
        "aria-label": `Download "${visible(picture.title)}" as ${format}`,
      },
      format,
    );
  return el(
    "span",
    { class: "downloads" },
    make("SVG", () => saveSvg(picture)),
    make("PNG", () => savePng(picture)),
  );
}
