// How magnitudes over depth develop during training, and whether Block keeps the pattern of Full.
import { chart, describe, lines, type Series } from "../chart";
import { bar, select, setOptions, toggle } from "../controls";
import { el, replace, userText, type Child } from "../dom";
import { figure, legendEntries, subject, type NamedRun } from "../figure";
import { number } from "../format";
import { heatMap } from "../heatmap";
import { readerName } from "../names";
import { unpack } from "../packed";
import { domainOf, runStyle, type Domain } from "../palette";
import { absent, named, type Section } from "../section";
import { table } from "../table";
import type { PageDocument, Pattern, Run } from "../types";

const NAMES: Record<string, string> = {
  output_norm: "norm of outputs ‖v‖",
  gradient_norm: "gradient at outputs",
  state_norm: "norm of the state",
  partial_norm: "norm of the running sum",
  contribution: "contribution ‖v‖ / ‖state‖",
  read_norm: "norm of reads ‖h‖",
  entropy: "entropy of reads",
  embedding_share: "share of the embedding",
  locality: "share of the newest source",
};

function seriesOf(run: Run): { value: string; label: string }[] {
  const known = run.over_training?.series ?? {};
  const order = Object.keys(NAMES);
  const names = Object.keys(known).filter((name) => known[name]);
  names.sort((a, b) => ((order.indexOf(a) + 99) % 99) - ((order.indexOf(b) + 99) % 99));
  return names.map((value) => ({ value, label: NAMES[value] ?? value }));
}

function logDomain(values: Float32Array): Domain {
  const positive = [...values].filter((value) => value > 0 && Number.isFinite(value)).sort((a, b) => a - b);
  const low = positive[Math.floor(0.01 * positive.length)] ?? 1e-3;
  return { low, high: Math.max(positive.at(-1) ?? 1, low * 1.01) };
}

function map(run: Run, name: string, log: boolean): HTMLElement {
  const array = unpack(run.over_training!.series[name]!);
  const places = array.shape[1] ?? 1;
  const label = NAMES[name] ?? name;
  return heatMap({
    label: `Heat map of the ${label} of ${run.name}: sublayers upwards, training to the right.`,
    unit: label.split(" ").at(-1) ?? "",
    values: array.data,
    places,
    tokens: run.over_training!.tokens,
    log,
    domain: log ? logDomain(array.data) : domainOf(array.data, "sequential"),
    place: (index) => readerName(run.kinds, index),
  });
}

function heat(runs: NamedRun[]): HTMLElement {
  const first = runs[0]!;
  const state = { run: first.run, name: seriesOf(first.run)[0]?.value ?? "", log: true };
  const box = el("div", {});
  const about = subject();
  const redraw = (): void => {
    about.set(state.run.name, NAMES[state.name] ?? state.name, state.log ? "logarithmic colours" : "");
    replace(box, map(state.run, state.name, state.log));
  };
  const series = select(
    "Series",
    seriesOf(first.run),
    state.name,
    (value) => {
      state.name = value;
      redraw();
    },
    "training-series",
  );
  const run = select(
    "Run",
    runs.map(({ run, index }) => ({ value: String(index), label: run.name })),
    String(first.index),
    (value) => {
      state.run = runs.find(({ index }) => String(index) === value)!.run;
      setOptions(series.select, seriesOf(state.run), state.name);
      state.name = series.select.value;
      redraw();
    },
    "training-run",
  );
  redraw();
  return figure(
    {
      title: "Depth against training",
      name: "over-training",
      subject: about,
      says: "Each column is one recording during training, each row one sublayer, the deepest on top.",
      controls: bar(
        runs.length > 1 ? run.node : null,
        series.node,
        toggle("logarithmic colours", true, (on) => {
          state.log = on;
          redraw();
        }),
      ),
    },
    box,
  );
}

function patternFigure(page: PageDocument, patterns: Pattern[]): HTMLElement {
  const indexOf = (name: string): number =>
    Math.max(
      0,
      page.runs.findIndex((run) => run.name === name),
    );
  const all: Series[] = patterns.map((pattern) => ({
    name: `${pattern.block} / ${pattern.full}`,
    ...runStyle(indexOf(pattern.block)),
    points: pattern.by_row.map((y, index) => ({ x: index + 1, y: y ?? NaN })),
  }));
  const picture = chart(
    (width) =>
      lines(width, all, {
        x: { label: "row (reader)", format: (value) => String(Math.round(value)) },
        y: {
          label: "correlation",
          domain: [Math.min(0, ...patterns.flatMap((each) => each.by_row.map((value) => value ?? 0))), 1],
        },
        height: 240,
      }),
    () => `Correlation by row: ${describe(all)}.`,
  );
  const legend = patterns.map((each) => ({ run: page.runs[indexOf(each.block)]!, index: indexOf(each.block) }));
  const text: Child[] = [
    table({
      caption: "Correlation of the matrices, all rows together.",
      headings: ["block", "full", "correlation"],
      rows: patterns.map((each) => [userText(each.block), each.full, number(each.correlation)]),
      numeric: [2],
    }),
  ];
  return figure(
    {
      title: "How much of Full's pattern Block keeps",
      name: "patterns",
      legend: () => legendEntries(legend),
      says: "Correlation between a row of Block's matrix and the same row of Full's, both as M. 1 is the same pattern.",
    },
    picture.node,
    ...text,
  );
}

const has = (run: Run): boolean => !!run.over_training?.tokens.length && seriesOf(run).length > 0;

export const trainingSection: Section = {
  id: "training",
  label: "Over training",
  title: "Over training",
  intro: "When does the pattern over depth form, and does it stay bounded?",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => has(run));
    const note = absent(
      all,
      has,
      /training|record|metrics|depth_every/i,
      "no magnitudes were recorded during training.",
    );
    const patterns = page.patterns?.length && page.runs.length ? patternFigure(page, page.patterns) : null;
    return [runs.length ? heat(runs) : null, patterns, note];
  },
};
