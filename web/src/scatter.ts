// Mass against change of loss as a picture.
import * as Plot from "@observablehq/plot";
import { interval, number, percent, visible } from "./format";
import { judge } from "./importance";
import type { Effect } from "./types";

export const KINDS = [
  { kind: "family", label: "families", colour: "var(--run-1)", symbol: "circle" },
  { kind: "source", label: "single sources", colour: "var(--run-2)", symbol: "square" },
  { kind: "route", label: "single routes", colour: "var(--run-3)", symbol: "triangle" },
  { kind: "value", label: "value routes", colour: "var(--run-4)", symbol: "diamond2" },
] as const;

function tip(effect: Effect): string {
  return `${visible(effect.name)}\nmass: ${percent(effect.mass)}\nchange of loss: ${interval(effect.loss)}\nKL: ${interval(effect.kl)}\nedges cut: ${effect.edges}\n${judge(effect)}`;
}

/** Effects differ by orders of magnitude: around 0 the axis is linear, further out logarithmic. */
function stretched(values: number[]): Plot.ScaleOptions {
  const low = Math.min(0, ...values);
  const high = Math.max(0, ...values);
  const room = 0.15;
  const ticks = [-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1, 10].filter(
    (tick) => tick >= low * (1 + room) && tick <= high * (1 + room),
  );
  return { type: "symlog", constant: 0.003, domain: [low * (1 + room) || -0.001, high * (1 + room) || 0.001], ticks };
}

export function scatter(width: number, effects: Effect[], stretch: boolean): Plot.PlotOptions {
  const usable = effects.filter((effect) => effect.mass !== null && Number.isFinite(effect.loss.mean));
  const controls = usable.flatMap((effect) =>
    (effect.controls?.loss ?? []).map((value) => ({ mass: effect.mass, value })),
  );
  const families = usable.filter((effect) => effect.kind === "family");
  const heights = [
    ...controls.map(({ value }) => value),
    ...usable.flatMap(({ loss: { mean, low, high } }) => [mean, low ?? mean, high ?? mean]),
  ];
  return {
    height: Math.max(300, Math.min(420, width * 0.5)),
    marginLeft: 60,
    marginBottom: 42,
    marginTop: 26,
    marginRight: 70,
    x: {
      label: "mass: share of |M| in the rows that were cut",
      labelAnchor: "center",
      labelArrow: "none",
      tickFormat: (value: number) => percent(value),
      ticks: Math.floor(width / 100),
      zero: true,
    },
    y: {
      label: "change of the loss when cut (nats per token)",
      labelArrow: "none",
      grid: true,
      ...(stretch ? stretched(heights) : { nice: true }),
      tickFormat: (value: number) => (value > 0 ? `+${number(value)}` : number(value)),
    },
    symbol: { legend: false },
    marks: [
      Plot.ruleY([0], { stroke: "var(--line-strong)" }),
      Plot.dot(controls, {
        x: "mass",
        y: "value",
        symbol: "times",
        r: 3,
        stroke: "var(--ink-soft)",
        strokeOpacity: 0.8,
      }),
      ...KINDS.flatMap(({ kind, colour, symbol }) => {
        const own = usable.filter((effect) => effect.kind === kind);
        return [
          Plot.ruleX(
            own.filter((effect) => effect.loss.low !== null),
            {
              x: "mass",
              y1: (effect: Effect) => effect.loss.low,
              y2: (effect: Effect) => effect.loss.high,
              stroke: colour,
              strokeWidth: 1.2,
              strokeOpacity: 0.75,
            },
          ),
          Plot.dot(own, {
            x: "mass",
            y: (effect: Effect) => effect.loss.mean,
            fill: colour,
            stroke: "var(--card)",
            strokeWidth: 0.8,
            symbol,
            r: kind === "family" ? 6 : 3.8,
          }),
        ];
      }),
      Plot.text(families, {
        x: "mass",
        y: (effect: Effect) => effect.loss.mean,
        text: (effect: Effect) => visible(effect.name),
        dx: 10,
        textAnchor: "start",
        fill: "var(--ink)",
        stroke: "var(--card)",
        strokeWidth: 3,
      }),
      Plot.tip(
        usable,
        Plot.pointer({
          x: "mass",
          y: (effect: Effect) => effect.loss.mean,
          title: tip,
          fill: "var(--card)",
          stroke: "var(--line-strong)",
        }),
      ),
    ],
  };
}
