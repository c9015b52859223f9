// Writes sample documents with synthetic data: `npm run sample -- FOLDER` (report.html, single.html, bare.html, explorer.json).
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import type { Ablation, Effect, PageDocument, Run, TokenTable } from "../src/types";
import { noise, pack, type Matrix } from "./numbers";
import { trace } from "./traces";

export const DEPTH = 24;
const STEPS = 30;
const range = (size: number): number[] => [...Array(size).keys()];

export interface Recipe {
  name: string;
  mechanism: string;
  kv?: string;
  shape: (row: number, column: number, random: () => number) => number;
  sources?: number;
  groups?: number;
  kind?: "scalar" | "head" | "operator";
  growth: (layer: number) => number;
  final: number;
}

const softer = (row: number, column: number, random: () => number): number =>
  (column === 0 ? 0.5 : 0.5 * Math.exp(-(row - column) / 6)) * (0.6 + random());
const blocky = (row: number, column: number, random: () => number): number =>
  softer(row, Math.floor((column + 2) / 3) * 3, random);

export const RECIPES: Recipe[] = [
  { name: "residual seed 0", mechanism: "residual", shape: () => 1, growth: (l) => 2.3 * (1 + l * 0.65), final: 1.646 },
  {
    name: "attnres seed 0",
    mechanism: "attnres",
    shape: softer,
    sources: DEPTH + 1,
    growth: (l) => 2 + Math.sin(l),
    final: 1.598,
  },
  {
    name: 'block_attnres <script>alert(1)</script> "q" 🧪',
    mechanism: "block_attnres",
    shape: blocky,
    sources: 9,
    groups: 4,
    kind: "head",
    growth: (l) => 4 + 4 * (l % 3),
    final: 1.575,
  },
  {
    name: "mhc \u202eesrever\u202c \u001b[31mred\u0000",
    mechanism: "mhc",
    shape: (r, c, n) => 0.9 + 0.5 * (n() - 0.5) - 0.01 * (r - c),
    growth: (l) => 3 + l * 0.4,
    final: 1.605,
  },
  {
    name: "ddl",
    mechanism: "ddl",
    kind: "operator",
    shape: (r, c, n) => Math.exp(-(r - c) / 8) * (n() - 0.35) * 2,
    growth: (l) => 3 + Math.sqrt(l),
    final: 1.63,
  },
  {
    name: "residual + depth_attention",
    mechanism: "residual",
    kv: "depth_attention",
    shape: () => 1,
    growth: (l) => 2.2 * (1 + l * 0.6),
    final: 1.668,
  },
];

export function matrixOf(recipe: Recipe, seed: number, rough = 1): Matrix {
  const random = noise(seed);
  const n = DEPTH + 1;
  const M: Matrix = range(n).map((row) =>
    range(n).map((column) => {
      const value = recipe.shape(row, column, () => 0.5 + rough * (random() - 0.5));
      return column <= row ? value : 0;
    }),
  );
  if (!/attnres/.test(recipe.mechanism)) return M;
  return M.map((row) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return row.map((value) => value / sum);
  });
}

function curves(recipe: Recipe): Run["curves"] {
  const random = noise(recipe.name.length);
  const at = (share: number): number =>
    recipe.final + 4.1 * Math.exp(-7 * share) * (1 - share) + 0.5 * (1 - share) ** 2;
  const train = range(150).map((i) => ({
    tokens: (i + 1) * 4096,
    seconds: (i + 1) * 1.9,
    loss: at((i + 1) / 150) + 0.12 * (random() - 0.5),
  }));
  const validation = range(15).map((i) => ({ tokens: (i + 1) * 40960, seconds: (i + 1) * 19, loss: at((i + 1) / 15) }));
  const columns = (rows: typeof train) => ({
    tokens: rows.map((r) => r.tokens),
    seconds: rows.map((r) => r.seconds),
    loss: rows.map((r) => r.loss),
  });
  return { train: columns(train), validation: columns(validation) };
}

function overTraining(recipe: Recipe): Run["over_training"] {
  const grow = (scale: number, width: number, random = noise(3)): Matrix =>
    range(STEPS).map((s) =>
      range(width).map((l) => scale * recipe.growth(l) * (0.4 + 0.6 * Math.min(1, s / 12)) * (0.9 + 0.2 * random())),
    );
  const gradient = range(STEPS).map((s) =>
    range(DEPTH).map((l) => (1e-3 * Math.exp(-s / 20)) / (recipe.mechanism === "residual" ? 1 + l / 5 : 1)),
  );
  return {
    tokens: range(STEPS).map((s) => (s + 1) * 20480),
    steps: range(STEPS).map((s) => (s + 1) * 5),
    series: {
      state_norm: pack(grow(1, DEPTH)),
      output_norm: pack(grow(0.3, DEPTH)),
      contribution: pack(grow(0.02, DEPTH)),
      gradient_norm: pack(gradient),
      read_norm: pack(grow(0.8, DEPTH + 1)),
    },
  };
}

function effect(name: string, kind: Effect["kind"], mass: number, mean: number, more: Partial<Effect> = {}): Effect {
  const half = 0.15 * Math.abs(mean) + 0.006;
  const spread = { mean, low: mean - half, high: mean + half };
  return {
    name,
    kind,
    sources: null,
    row: null,
    source: null,
    edges: 24,
    mass,
    loss: spread,
    kl: { mean: Math.abs(mean) * 0.8, low: Math.abs(mean) * 0.7, high: Math.abs(mean) * 0.9 },
    controls: null,
    ...more,
  };
}

function ablation(recipe: Recipe, M: Matrix): Ablation {
  const random = noise(11);
  const controls = (scale: number) => ({
    count: 8,
    loss: range(8).map(() => scale * random()),
    kl: range(8).map(() => scale * random()),
  });
  const effects = [
    effect("embedding", "family", 0.47, 0.92, { controls: controls(0.12) }),
    effect("recent", "family", 0.07, 0.31, { edges: 24, controls: controls(0.15) }),
    effect("older", "family", 0.43, 0.018, { edges: 252, controls: controls(0.5) }),
    effect("partial", "family", 0.04, 0.002, { controls: controls(0.03) }),
    ...range(DEPTH).map((i) =>
      effect(`source ${i + 1}`, "source", 0.02 + 0.1 * random(), 0.2 * random() ** 3, {
        source: i + 1,
        edges: DEPTH - i,
      }),
    ),
  ];
  const routes = M.flatMap((row, r) => row.map((value, c) => ({ r, c, value })))
    .filter(({ r, c }) => c < r)
    .sort((a, b) => b.value - a.value)
    .slice(0, 14);
  effects.push(
    ...routes.map(({ r, c, value }) =>
      effect(`route ${c}→${r + 1}`, "route", Math.min(1, value), 0.03 * (random() - 0.2), {
        row: r,
        source: c,
        edges: 1,
      }),
    ),
  );
  return {
    tokens: 16384,
    rows: 64,
    loss: recipe.final,
    renormalise: true,
    confidence: 0.95,
    how: "Each cut was replayed from the recorded state; the other weights of a row were scaled up to the same sum.",
    effects,
  };
}

function health(recipe: Recipe): Run["health"] {
  const sink = recipe.mechanism === "attnres";
  return [
    {
      name: "dilution",
      level: recipe.mechanism === "residual" ? "notice" : "good",
      figure: "an output is 0.12 of the stream at the end",
      meaning: "Late sublayers add little to what is already there.",
      remedy: "Try a mechanism that restarts or weights the stream, such as block_attnres.",
    },
    {
      name: "sinks",
      level: sink ? "problem" : "good",
      figure: sink ? "0.47 of all reads take the embedding" : "no source stands out",
      meaning: "One source takes most of the weight of all readers.",
      remedy: "Compare with a window, or cut the source to see whether it matters.",
    },
    {
      name: "gradients",
      level: recipe.kv ? "unknown" : "good",
      figure: recipe.kv ? "not recorded" : "early over late 0.95",
      meaning: "Gradients over depth.",
      remedy: "Record magnitudes with run.depth_every.",
    },
  ];
}

export function makeRun(recipe: Recipe, index: number): Run {
  const M = matrixOf(recipe, index + 1);
  const saved = trace(recipe, M, DEPTH);
  const snaps = [0, 0.3, 0.6].map((rough, s) => matrixOf(recipe, index + 20 + s, rough));
  return {
    name: recipe.name,
    mechanism: recipe.mechanism,
    options: recipe.mechanism === "residual" ? {} : { heads: recipe.groups ?? 1, mixing: "softmax" },
    kv_mechanism: recipe.kv ?? null,
    depth: DEPTH,
    kinds: range(DEPTH).map((i) => (i % 2 ? "mlp" : "attn")),
    dim: 96,
    seed: 0,
    finished: index !== 4,
    facts: [
      ["parameters", "1,384,032"],
      ["tokens", "614,400"],
      ["learning rate", "0.01"],
      ["tokens/s", String(4200 - 300 * index)],
      ["peak memory", `${(1.1 + index * 0.02).toFixed(2)} GB`],
    ],
    hashes: {
      config: "7cd354b21b".repeat(6),
      data: "aba99030e2".repeat(6),
      weights: index === 3 ? null : "6ed650a30a".repeat(6),
    },
    curves: curves(recipe),
    over_training: index === 5 ? null : overTraining(recipe),
    snapshots:
      index === 4
        ? null
        : {
            steps: [50, 100, 150],
            tokens: [204800, 409600, 614400],
            M: pack(snaps),
            weights: saved.weights3(snaps),
            values: recipe.kv ? pack([saved.values, saved.values, saved.values]) : null,
            source_names: saved.trace.source_names,
            reads: saved.trace.reads,
          },
    trace: index === 3 ? null : saved.trace,
    ablation: index === 1 || index === 2 ? ablation(recipe, M) : null,
    health: health(recipe),
    missing:
      index === 3
        ? ["No trace was saved: the weights of this run were not kept."]
        : index === 5
          ? ["Nothing was recorded during training: run.depth_every was 0."]
          : [],
  };
}

export function sampleTable(run: Run): TokenTable | null {
  return run.trace?.table ?? null;
}

export function makeDocument(kind: PageDocument["kind"]): PageDocument {
  const runs = RECIPES.map(makeRun);
  return {
    format: 1,
    kind,
    title: kind === "report" ? "Six mechanisms in a deep, narrow decoder" : "Explorer: six mechanisms",
    made: {
      command: "depthmix report studies/first --out report.html",
      depthmix: "0.3.0",
      torch: "2.9.0",
      machine: "2 CPU cores",
      date: "2026-11-18",
    },
    study: {
      verdicts: [
        "block_attnres: its final loss is 0.071 lower than residual's (95 % interval −0.086 to −0.055, 5 seeds); one of its tokens is worth 1.21 of residual's.",
        "depth_attention: no difference from residual was found (+0.022, 95 % interval −0.006 to +0.050).",
      ],
      losses: {
        headings: ["mechanism", "seeds", "final loss", "minus residual", "95 % interval"],
        cells: RECIPES.map((r, i) => [
          r.name,
          "5",
          r.final.toFixed(4),
          i ? (r.final - 1.646).toFixed(4) : "",
          i ? "−0.0861 to −0.0548" : "",
        ]),
      },
      cost: {
        headings: ["arm", "tokens/s", "peak memory", "parameters"],
        cells: RECIPES.slice(1).map((r) => [r.name, "undecided", "1.07×", "1.0033"]),
        note: "Ratios to the baseline, paired by seed.",
      },
      about: { seeds: "0 to 4", data: "stdlib, bytes" },
    },
    findings: [
      {
        claim: "the residual stream grows with depth, outputs are diluted",
        verdict: "seen",
        figure: "stream 2.3 to 37.7",
        note: "an output is 0.12 to 0.18 of the stream in the last third",
      },
      {
        claim: "gradients are flatter over depth",
        verdict: "unclear",
        figure: "early over late 3.4 against 0.91",
        note: "",
      },
      {
        claim: "more of the embedding before attention than before MLPs",
        verdict: "opposite",
        figure: "0.38 against 0.55",
        note: "the same order with AdamW",
      },
      { claim: "diagonal dominance", verdict: "not seen", figure: "0.07", note: "equal weights give 0.15" },
    ],
    patterns: [
      {
        block: RECIPES[2]!.name,
        full: RECIPES[1]!.name,
        correlation: 0.83,
        by_row: range(DEPTH + 1).map((r) => (r === 0 ? null : 0.95 - r * 0.02)),
      },
    ],
    runs,
  };
}

/** The built page with a document in it, written as Python writes it. */
export function pageWith(page: PageDocument): string {
  const html = readFileSync(
    join(dirname(fileURLToPath(import.meta.url)), "../../src/depthmix/report/page.html"),
    "utf8",
  );
  const json = JSON.stringify(page, (_, value) => (typeof value === "number" && !Number.isFinite(value) ? null : value))
    .replaceAll("<", "\\u003c")
    .replaceAll("\u2028", "\\u2028")
    .replaceAll("\u2029", "\\u2029");
  return html.replace('id="document">null<', () => `id="document">${json}<`);
}

const folder = process.argv[2];
if (folder) {
  mkdirSync(folder, { recursive: true });
  const report = makeDocument("report");
  const bare: Run = {
    ...report.runs[0]!,
    name: "bare",
    curves: null,
    over_training: null,
    snapshots: null,
    trace: null,
    ablation: null,
    health: [],
    missing: ["This run has no metrics: it never started."],
  };
  const none = { study: null, findings: null, patterns: null };
  writeFileSync(join(folder, "report.html"), pageWith(report));
  writeFileSync(
    join(folder, "single.html"),
    pageWith({ ...report, ...none, title: "attnres", runs: [report.runs[1]!] }),
  );
  writeFileSync(join(folder, "bare.html"), pageWith({ ...report, ...none, title: "A run without data", runs: [bare] }));
  writeFileSync(join(folder, "explorer.html"), pageWith(makeDocument("explorer")));
}
