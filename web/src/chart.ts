// Charts of Observable Plot that follow the width of their box, and lines by run.
import * as Plot from "@observablehq/plot";
import { el } from "./dom";
import { number, short } from "./format";

export interface Chart {
  node: HTMLElement;
  redraw: () => void;
}

export type Drawing = (width: number) => Plot.PlotOptions;

const STYLE = {
  background: "transparent",
  color: "var(--ink-soft)",
  fontFamily: "inherit",
  fontSize: "11.5px",
  overflow: "visible",
};

/** Plot names its groups ("line", "dot"), also those that it draws under the pointer; the figure's own text replaces them. */
function hideGroups(picture: Element): void {
  const hide = (): void =>
    picture
      .querySelectorAll("g[aria-label]:not([aria-hidden])")
      .forEach((group) => group.setAttribute("aria-hidden", "true"));
  hide();
  new MutationObserver(hide).observe(picture, { childList: true, subtree: true });
}

/** Draws now, again when its box changes width, and whenever `redraw` is called. */
export function chart(drawing: Drawing, alternative: () => string): Chart {
  const node = el("div", { class: "chart" });
  let width = 0;
  const redraw = (): void => {
    if (!width) return;
    const options = drawing(width);
    const picture = Plot.plot({ width, ...options, style: { ...STYLE } as never });
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", alternative());
    picture.removeAttribute("aria-labelledby");
    hideGroups(picture);
    node.replaceChildren(picture);
  };
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry?.contentRect.width ?? 0);
    if (now && now !== width) {
      width = now;
      redraw();
    }
  }).observe(node);
  return { node, redraw };
}

export interface Series {
  name: string;
  colour: string;
  dash?: string;
  points: { x: number; y: number }[];
  thin?: boolean;
  curve?: "linear" | "step-after";
  dots?: boolean;
}

export interface LinesOptions {
  x: { label: string; format?: (value: number) => string };
  y: { label: string; log?: boolean; format?: (value: number) => string; zero?: boolean; domain?: [number, number] };
  height?: number;
  marks?: Plot.Markish[];
}

interface Point {
  x: number;
  y: number;
  name: string;
}

function usable(series: Series, log: boolean): Point[] {
  return series.points
    .filter(({ x, y }) => Number.isFinite(x) && Number.isFinite(y) && (!log || y > 0))
    .map(({ x, y }) => ({ x, y, name: series.name }));
}

export function lines(width: number, all: Series[], options: LinesOptions): Plot.PlotOptions {
  const { x, y } = options;
  const log = y.log ?? false;
  const marks: Plot.Markish[] = [...(options.marks ?? [])];
  const thick: Point[] = [];
  for (const series of all) {
    const points = usable(series, log);
    marks.push(
      Plot.line(points, {
        x: "x",
        y: "y",
        stroke: series.colour,
        strokeWidth: series.thin ? 0.9 : 2,
        strokeOpacity: series.thin ? 0.45 : 1,
        clip: y.domain ? true : undefined,
        strokeDasharray: series.thin ? undefined : series.dash,
      }),
    );
    const inside = points.filter(({ y: height }) => !y.domain || (height >= y.domain[0] && height <= y.domain[1]));
    if (!series.thin) thick.push(...inside);
    if (series.dots) marks.push(Plot.dot(inside, { x: "x", y: "y", r: 2.2, fill: series.colour }));
  }
  const title = (point: Point): string =>
    `${point.name}\n${x.label}: ${(x.format ?? number)(point.x)}\n${y.label}: ${(y.format ?? number)(point.y)}`;
  marks.push(
    Plot.tip(thick, Plot.pointer({ x: "x", y: "y", title, fill: "var(--card)", stroke: "var(--line-strong)" })),
  );
  return {
    height: options.height ?? Math.max(220, Math.min(360, width * 0.5)),
    marginLeft: 52,
    marginRight: 14,
    marginBottom: 38,
    marginTop: 24,
    x: {
      label: x.label,
      tickFormat: x.format ?? short,
      ticks: Math.max(3, Math.floor(width / 90)),
      labelAnchor: "center",
      labelArrow: "none",
    },
    y: {
      label: y.label,
      type: log ? "log" : "linear",
      grid: true,
      zero: y.zero && !log,
      tickFormat: y.format ?? short,
      ticks: log ? 4 : 6,
      labelArrow: "none",
      ...(y.domain ? { domain: y.domain } : {}),
    },
    marks,
  };
}

/** "residual from 5.5 to 1.65" for each line: the text alternative of a line chart. */
export function describe(all: Series[], format: (value: number) => string = number): string {
  return all
    .filter((series) => !series.thin)
    .map((series) => {
      const points = series.points.filter(({ y }) => Number.isFinite(y));
      const [first, last] = [points[0], points.at(-1)];
      return first && last
        ? `${series.name} from ${format(first.y)} to ${format(last.y)}`
        : `${series.name} without values`;
    })
    .join("; ");
}
