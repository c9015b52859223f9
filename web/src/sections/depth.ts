// Magnitudes and statistics of reads over depth, one line for each run.
import { chart, describe, lines, type Series } from "../chart";
import { bar, toggle } from "../controls";
import { el } from "../dom";
import { figure, legendEntries, runLegend, type NamedRun } from "../figure";
import { runStyle } from "../palette";
import { absent, named, type Section } from "../section";
import type { Maybe, Run } from "../types";

interface Kind {
  name: string;
  title: string;
  says: string;
  label: string;
  /** Norms are shown on a logarithmic axis on demand. */
  norm: boolean;
  values: (run: Run) => Maybe[];
}

/** Several streams or tensors as one number: the root of their mean square. */
export function together(value: Maybe[] | Maybe): Maybe {
  if (!Array.isArray(value)) return value;
  const known = value.filter((each): each is number => each !== null && Number.isFinite(each));
  return known.length ? Math.sqrt(known.reduce((sum, each) => sum + each * each, 0) / known.length) : null;
}

/** From this ratio of the largest to the smallest on, norms start with a logarithmic axis. */
const WIDE = 30;

const KINDS: Kind[] = [
  {
    name: "state_norm",
    title: "Norm of the stream",
    label: "‖state‖",
    norm: true,
    says: "What the state holds after each sublayer has written: the residual stream, the running sum of a block, or the new output.",
    values: (run) => (run.trace?.magnitudes?.state_norm ?? []).map(together),
  },
  {
    name: "output_norm",
    title: "Norm of the outputs",
    label: "‖v‖",
    norm: true,
    says: "What each sublayer returns.",
    values: (run) => run.trace?.magnitudes?.output_norm ?? [],
  },
  {
    name: "contribution",
    title: "Contribution of an output",
    label: "‖v‖ / ‖state‖",
    norm: true,
    says: "An output relative to the state it is written into: a falling line is dilution.",
    values: (run) => run.trace?.magnitudes?.contribution ?? [],
  },
  {
    name: "gradient_norm",
    title: "Gradient at the outputs",
    label: "‖∂loss / ∂v‖",
    norm: true,
    says: "How strongly the loss pulls at each output, by all paths; a flat line trains all depths alike.",
    values: (run) => run.trace?.magnitudes?.gradient_norm ?? [],
  },
  {
    name: "entropy",
    title: "Entropy of a read",
    label: "entropy (nats)",
    norm: false,
    says: "How widely a reader spreads its weights: 0 is one source only.",
    values: (run) => run.trace?.rows.entropy ?? [],
  },
  {
    name: "embedding_share",
    title: "Share of the embedding",
    label: "share of a read",
    norm: false,
    says: "How much of each read is the embedding.",
    values: (run) => run.trace?.rows.embedding_share ?? [],
  },
  {
    name: "locality",
    title: "Share of the newest source",
    label: "share of a read",
    norm: false,
    says: "How much of each read is the output just below it.",
    values: (run) => run.trace?.rows.locality ?? [],
  },
  {
    name: "spread",
    title: "Spread over tokens",
    label: "spread of the shares",
    norm: false,
    says: "How far single tokens are from their mean; 0 means that all tokens read alike.",
    values: (run) => run.trace?.rows.spread ?? [],
  },
];

function seriesOf(runs: NamedRun[], hidden: Set<number>, kind: Kind): Series[] {
  return runs
    .filter(({ index }) => !hidden.has(index))
    .map(({ run, index }) => ({
      name: run.name,
      ...runStyle(index),
      points: kind.values(run).map((y, place) => ({ x: place + 1, y: y ?? NaN })),
    }));
}

/** True where some norms are so much larger than others that a linear axis shows only those. */
function wide(runs: NamedRun[]): boolean {
  return KINDS.filter((kind) => kind.norm).some((kind) => {
    const known = runs
      .flatMap(({ run }) => kind.values(run))
      .filter((value): value is number => value !== null && Number.isFinite(value) && value > 0);
    return Math.max(...known) > WIDE * Math.min(...known);
  });
}

const has = (run: Run): boolean => KINDS.some((kind) => kind.values(run).some((value) => value !== null));

export const depthSection: Section = {
  id: "depth",
  label: "Over depth",
  title: "Over depth",
  intro: "Do magnitudes grow, are outputs diluted, and does every depth get gradients?",
  draw: (page) => {
    const all = named(page);
    const runs = all.filter(({ run }) => has(run));
    const note = absent(all, has, /trace|magnitude|gradient|depth/i, "no trace was saved.");
    if (!runs.length) return [note];
    const hidden = new Set<number>();
    const state = { log: wide(runs) };
    const redraws: (() => void)[] = [];
    const redraw = (): void => redraws.forEach((each) => each());
    const figures = KINDS.filter((kind) =>
      runs.some(({ run }) => kind.values(run).some((value) => value !== null)),
    ).map((kind) => {
      const picture = chart(
        (width) =>
          lines(width, seriesOf(runs, hidden, kind), {
            x: {
              label: kind.norm ? "sublayer" : "reader (sublayer; the last is the head)",
              format: (value) => String(Math.round(value)),
            },
            y: { label: kind.label, log: kind.norm && state.log, zero: true },
            height: 250,
          }),
        () => `${kind.title} over sublayers: ${describe(seriesOf(runs, hidden, kind))}.`,
      );
      redraws.push(picture.redraw);
      return figure(
        { title: kind.title, says: kind.says, name: `depth-${kind.name}`, legend: () => legendEntries(runs, hidden) },
        picture.node,
      );
    });
    return [
      note,
      bar(
        runLegend(runs, hidden, redraw),
        toggle(
          "logarithmic norms",
          state.log,
          (on) => {
            state.log = on;
            redraw();
          },
          "log",
        ),
      ),
      el("div", { class: "two" }, ...figures),
    ];
  },
};
