// A heat map of depth against training. Depth runs upwards, as the network does.
import { el, sideways, svg } from "./dom";
import { number, short } from "./format";
import { cellColour, type Domain } from "./palette";

export interface HeatMapOptions {
  label: string;
  unit: string;
  /** [recordings, places] */
  values: Float32Array;
  places: number;
  tokens: number[];
  domain: Domain;
  log: boolean;
  place: (index: number) => string;
}

const LEFT = 48;
const WIDTH = 760;
const BODY = 300;

function scaled(value: number, log: boolean): number {
  return log ? Math.log10(Math.max(value, 1e-12)) : value;
}

function axis(options: HeatMapOptions, cellWidth: number, cellHeight: number): SVGElement[] {
  const { tokens, places } = options;
  const columnStep = Math.max(1, Math.ceil(56 / cellWidth));
  const rowStep = Math.max(1, Math.ceil(13 / cellHeight));
  const nodes: SVGElement[] = [];
  tokens.forEach((value, index) => {
    if (index % columnStep) return;
    nodes.push(
      svg("text", { x: LEFT + (index + 0.5) * cellWidth, y: BODY + 20, "text-anchor": "middle" }, short(value)),
    );
  });
  for (let place = 0; place < places; place += rowStep) {
    nodes.push(
      svg("text", { x: LEFT - 6, y: BODY - (place + 0.5) * cellHeight + 4, "text-anchor": "end" }, String(place + 1)),
    );
  }
  nodes.push(
    svg("text", { x: LEFT, y: BODY + 38, class: "axis-title" }, "tokens read →"),
    svg(
      "text",
      { x: 11, y: BODY / 2, class: "axis-title", "text-anchor": "middle", transform: `rotate(-90 11 ${BODY / 2})` },
      "sublayer →",
    ),
  );
  return nodes;
}

function colourBar({ domain, log, unit }: HeatMapOptions): SVGElement[] {
  const nodes: SVGElement[] = [];
  const x = WIDTH - 190;
  for (let i = 0; i < 40; i++) {
    const low = scaled(domain.low, log);
    const value = low + ((i + 0.5) / 40) * (scaled(domain.high, log) - low);
    nodes.push(
      svg("rect", {
        x: x + i * 4,
        y: BODY + 34,
        width: 4.3,
        height: 9,
        style: `fill:${cellColour(value, "sequential", { low, high: scaled(domain.high, log) })}`,
      }),
    );
  }
  nodes.push(
    svg("text", { x, y: BODY + 56 }, number(domain.low, 2)),
    svg("text", { x: x + 160, y: BODY + 56, "text-anchor": "end" }, number(domain.high, 2)),
    svg("text", { x: x + 80, y: BODY + 56, "text-anchor": "middle", class: "axis-title" }, unit),
  );
  return nodes;
}

/** The picture and the line that says the value under the pointer. */
export function heatMap(options: HeatMapOptions): HTMLElement {
  const { values, places, tokens, domain, log } = options;
  const cellWidth = (WIDTH - LEFT - 8) / Math.max(1, tokens.length);
  const cellHeight = BODY / Math.max(1, places);
  const colours: Domain = { low: scaled(domain.low, log), high: scaled(domain.high, log) };
  const cells: SVGElement[] = [];
  tokens.forEach((_, column) => {
    for (let place = 0; place < places; place++) {
      const value = values[column * places + place] ?? NaN;
      if (!Number.isFinite(value)) continue;
      cells.push(
        svg("rect", {
          x: LEFT + column * cellWidth,
          y: BODY - (place + 1) * cellHeight,
          width: cellWidth + 0.3,
          height: cellHeight + 0.3,
          "data-column": column,
          "data-row": place,
          style: `fill:${cellColour(scaled(value, log), "sequential", colours)}`,
        }),
      );
    }
  });
  const picture = svg(
    "svg",
    {
      role: "img",
      "aria-label": options.label,
      viewBox: `0 0 ${WIDTH} ${BODY + 64}`,
      class: "heatmap",
      style: "min-width:520px",
    },
    svg("g", {}, ...cells),
    svg("g", { class: "axis" }, ...axis(options, cellWidth, cellHeight), ...colourBar(options)),
  );
  const readout = el("output", { class: "readout empty" }, "Point at a cell for its value.");
  picture.addEventListener("pointermove", (event) => {
    const { column, row } = (event.target as SVGElement).dataset;
    if (column === undefined || row === undefined) return;
    const value = values[Number(column) * places + Number(row)];
    readout.textContent = `${options.place(Number(row))} after ${short(tokens[Number(column)] ?? 0)} tokens: ${number(value)}`;
    readout.classList.remove("empty");
  });
  return el("div", {}, sideways("Heat map, scrolls sideways if it is wide", picture), readout);
}
