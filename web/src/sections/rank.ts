// How many vectors must cross a cut of the network.
import * as Plot from "@observablehq/plot";
import { chart } from "../chart";
import { el } from "../dom";
import { figure, type NamedRun } from "../figure";
import { number, shorten, visible } from "../format";
import { runStyle } from "../palette";
import { absent, named, type Section } from "../section";
import { table } from "../table";
import type { Run } from "../types";
import { runCell } from "./verdict";

interface Mark {
  run: string;
  value: number;
  colour: string;
}

function marks(runs: NamedRun[], value: (run: Run) => number | null | undefined): Mark[] {
  return runs.flatMap(({ run, index }) => {
    const known = value(run);
    return known === null || known === undefined
      ? []
      : [{ run: String(index), value: known, colour: runStyle(index).colour }];
  });
}

function highest(runs: NamedRun[]): number {
  return Math.max(
    1,
    ...runs.flatMap(({ run }) => [
      run.trace?.rank?.max ?? 0,
      run.trace?.rank?.declared ?? 0,
      run.trace?.effective_rank?.mean ?? 0,
    ]),
  );
}

function dots(width: number, runs: NamedRun[]): Plot.PlotOptions {
  const left = Math.min(160, width * 0.3);
  const spread = runs.flatMap(({ run, index }) => {
    const effective = run.trace?.effective_rank;
    return effective && effective.mean !== null && effective.std !== null
      ? [{ run: String(index), low: effective.mean - effective.std, high: effective.mean + effective.std }]
      : [];
  });
  const names = new Map(
    runs.map(({ run, index }) => [String(index), shorten(visible(run.name), Math.floor(left / 7))]),
  );
  const own = { x: "value", y: "run" };
  return {
    height: 60 + 34 * runs.length,
    marginLeft: left,
    marginBottom: 38,
    marginRight: 20,
    marginTop: 8,
    x: {
      label: "rank",
      labelAnchor: "center",
      labelArrow: "none",
      grid: true,
      zero: true,
      tickFormat: "d",
      ticks: Math.min(12, Math.ceil(highest(runs)) + 1),
    },
    y: {
      type: "point",
      domain: runs.map(({ index }) => String(index)),
      label: null,
      tickFormat: (name: string) => names.get(name) ?? name,
      tickSize: 0,
      padding: 0.6,
    },
    marks: [
      Plot.ruleY(
        runs.map(({ index }) => String(index)),
        { stroke: "var(--line)" },
      ),
      Plot.dot(
        marks(runs, (run) => run.trace?.rank?.declared),
        { ...own, symbol: "diamond2", r: 8, stroke: "var(--ink)", fill: "none", strokeWidth: 1.5 },
      ),
      Plot.dot(
        marks(runs, (run) => run.trace?.rank?.max),
        { ...own, r: 6.5, stroke: "colour", fill: "none", strokeWidth: 1.6 },
      ),
      Plot.dot(
        marks(runs, (run) => run.trace?.rank?.mean),
        { ...own, r: 4, fill: "colour" },
      ),
      Plot.ruleY(spread, { x1: "low", x2: "high", y: "run", dy: 9, stroke: "var(--ink-soft)", strokeWidth: 1.5 }),
      Plot.dot(
        marks(runs, (run) => run.trace?.effective_rank?.mean),
        { ...own, symbol: "triangle", r: 4, dy: 9, fill: "var(--ink-soft)" },
      ),
    ],
    color: { type: "identity" },
  };
}

const has = (run: Run): boolean => !!run.trace?.rank || !!run.trace?.effective_rank;

export const rankSection: Section = {
  id: "rank",
  label: "Rank",
  title: "Rank of the depth mixing",
  intro:
    "Does the model use the freedom that its mechanism gives it? The semiseparable rank is the number of vectors that must cross a cut of the network; a plain residual has 1.",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => has(run));
    const note = absent(all, has, /rank|operator/i, "no rank was computed.");
    if (!runs.length) return [note];
    const picture = chart(
      (width) => dots(width, runs),
      () =>
        `Ranks: ${runs.map(({ run }) => `${run.name} semiseparable ${number(run.trace?.rank?.mean)}, effective ${number(run.trace?.effective_rank?.mean)}`).join("; ")}.`,
    );
    const key = el(
      "div",
      { class: "key-row" },
      el("span", {}, "● semiseparable, mean over tokens"),
      el("span", {}, "○ its largest"),
      el("span", {}, "◇ declared by the mechanism"),
      el("span", {}, "▲ effective rank, ± one standard deviation"),
    );
    return [
      figure(
        {
          title: "Ranks",
          name: "rank",
          legend: () => [
            { name: "semiseparable, mean over tokens", colour: "var(--ink)", symbol: "circle" },
            { name: "its largest", colour: "var(--ink)", symbol: "circle", hollow: true },
            { name: "declared by the mechanism", colour: "var(--ink)", symbol: "diamond2", hollow: true },
            { name: "effective rank, ± one standard deviation", colour: "var(--ink-soft)", symbol: "triangle" },
          ],
          says: "A full circle below its diamond means that part of the mechanism's freedom is unused.",
        },
        key,
        picture.node,
      ),
      table({
        caption: "Ranks of M, computed for each token.",
        headings: [
          "run",
          "semiseparable, mean",
          "largest",
          "tolerance",
          "declared",
          "effective, mean",
          "standard deviation",
          "tokens",
        ],
        rows: runs.map((each) => {
          const { rank, effective_rank: effective, samples } = each.run.trace!;
          return [
            runCell(each),
            number(rank?.mean),
            number(rank?.max),
            number(rank?.tolerance),
            number(rank?.declared),
            number(effective?.mean),
            number(effective?.std),
            String(samples.rank),
          ];
        }),
        numeric: [1, 2, 3, 4, 5, 6, 7],
      }),
      note,
    ];
  },
};
