// A synthetic trace of a run.
import type { Packed, TokenTable, Trace } from "../src/types";
import type { Recipe } from "./make";
import { noise, pack, type Matrix } from "./numbers";

const range = (size: number): number[] => [...Array(size).keys()];
const TEXT = [
  "def",
  " ",
  "read",
  "(",
  "self",
  ",",
  " ",
  "state",
  ")",
  ":",
  "\n",
  "\t",
  "return",
  " ",
  "<b>",
  '"',
  "𝕊",
  "‮",
  "שלום",
  "\u0000",
  "\u001b",
  "🧪",
  "é",
  "́",
  "",
  "   ",
  "combine",
  "(",
  "state",
  ",",
  " ",
  "carry",
  ")",
];

function blocks(M: Matrix, sources: number): { weights: Matrix; reads: number[][] } {
  const depth = M.length - 1;
  const of = (column: number): number =>
    column === 0 ? 0 : Math.min(sources - 1, sources === depth + 1 ? column : 1 + Math.floor((column - 1) / 3));
  const reads = M.map((_, row) => [...new Set(range(row + 1).map(of))]);
  const weights = M.map((line, row) => {
    const out = Array<number>(sources).fill(0);
    const counts = Array<number>(sources).fill(0);
    range(row + 1).forEach((column) => {
      out[of(column)]! += line[column]!;
      counts[of(column)]!++;
    });
    const means = out.map((value, i) => (counts[i] ? value / counts[i]! : 0));
    const sum = means.reduce((a, b) => a + b, 0);
    return means.map((value) => value / sum);
  });
  return { weights, reads };
}

function names(sources: number, depth: number): string[] {
  const word = sources === depth + 1 ? "output" : "block";
  return ["embedding", ...range(sources - 1).map((i) => `${word} ${i + 1}`)];
}

export interface Saved {
  trace: Trace;
  values: Matrix;
  weights3: (matrices: Matrix[]) => Packed | null;
}

export function trace(recipe: Recipe, M: Matrix, depth: number): Saved {
  const random = noise(5 + recipe.name.length);
  const groups = recipe.groups ?? 1;
  const jitter = (matrix: Matrix, size: number): Matrix =>
    matrix.map((row, r) => row.map((v, c) => (c <= r ? v * (1 + size * (random() - 0.5)) : 0)));
  const many = (matrix: Matrix): Matrix[] => range(groups).map((g) => jitter(matrix, 0.3 * g));
  const share = M.map((row) => {
    const sum = row.reduce((a, b) => a + Math.abs(b), 0);
    return row.map((v) => v / sum);
  });
  const values = range(depth / 2).map((r) =>
    range(depth / 2).map((c) => (c < r ? (0.5 / r) * random() * 2 : c === r ? 0.5 : 0)),
  );
  const listed = recipe.sources ? blocks(M, recipe.sources) : null;
  const shares = share.map((row) => ({
    entropy: -row.reduce((sum, p) => sum + (p > 0 ? p * Math.log(p) : 0), 0),
    embedding: row[0]!,
  }));
  const growth = range(depth).map(recipe.growth);
  const entropy = shares.map((each) => each.entropy);
  const table: TokenTable = {
    tokens: [...TEXT, ...TEXT].slice(0, 64),
    loss: range(64).map((i) => (i === 0 ? null : 4 * random() ** 2)),
    M: pack(
      range(64).map(() => many(jitter(M, 0.8))),
      "f16",
    ),
    weights: listed
      ? pack(
          range(64).map(() => range(groups).map(() => jitterAll(listed.weights, random))),
          "f16",
        )
      : null,
    values: recipe.kv
      ? pack(
          range(64).map(() => [values, jitter(values, 0.5)]),
          "f16",
        )
      : null,
    source_names: listed ? names(recipe.sources!, depth) : [],
    reads: listed?.reads ?? [],
  };
  const operator = recipe.kind === "operator";
  return {
    values,
    weights3: (matrices) =>
      recipe.sources ? pack(matrices.map((each) => blocks(each, recipe.sources!).weights)) : null,
    trace: {
      kind: recipe.kind ?? "scalar",
      summary: operator ? "M of an operator-valued mechanism: gains ⟨T w, w⟩/|w|² of the writes, a summary." : "M",
      channels: null,
      text: { source: "stdlib, validation", sha256: "ab".repeat(32), context: 256 },
      tokens: 65536,
      loss: recipe.final + 0.01,
      samples: { rank: 2048, gradients: 512, table: 64 },
      histogram: { relative_error: 0.01, absolute_error: 1e-4, quantiles: [0.05, 0.25, 0.5, 0.75, 0.95] },
      source_names: listed ? names(recipe.sources!, depth) : [],
      reads: listed?.reads ?? [],
      partial: M.map((_, r) => r % 3 !== 0),
      rows: {
        entropy,
        entropy_std: entropy.map((e) => e * 0.1),
        locality: share.map((row, r) => row[r]!),
        embedding_share: shares.map((s) => s.embedding),
        spread: entropy.map(() => (recipe.mechanism === "residual" ? 0 : 0.05 + 0.1 * random())),
      },
      shares_of: listed ? "weights" : "M",
      sinks: share[depth]!,
      rank: operator
        ? null
        : {
            mean: recipe.mechanism === "residual" ? 1 : 4 + 8 * random(),
            max: recipe.mechanism === "residual" ? 1 : 13,
            tolerance: 1e-5,
            declared: recipe.mechanism === "residual" ? 1 : recipe.sources ? Math.min(13, recipe.sources) : null,
          },
      effective_rank: operator
        ? null
        : { mean: recipe.mechanism === "residual" ? 1 : 3 + random(), std: recipe.mechanism === "residual" ? 0 : 0.4 },
      magnitudes: {
        embedding_norm: 1.6,
        read_norm: [...growth, growth.at(-1)!],
        output_norm: growth.map((g) => 0.3 * g),
        state_norm: growth.map((g) => [g, g * 1.1]),
        contribution: growth.map((_, l) =>
          recipe.mechanism === "residual" ? 0.82 / (1 + l * 0.25) : 0.4 + 0.1 * random(),
        ),
        read_gradient_norm: [...growth.map(() => null), null],
        gradient_norm: growth.map((_, l) =>
          operator ? null : 1e-4 * (recipe.mechanism === "residual" ? 3.4 / (1 + l / 4) : 1 + 0.2 * random()),
        ),
        stream_distance: null,
      },
      tensors: {
        M_mean: pack(many(M)),
        M_std: pack(
          many(M.map((row) => row.map((v) => (recipe.mechanism === "residual" ? 0 : Math.abs(v) * 0.4 * random())))),
        ),
        M_quantiles: pack(
          [0.5, 0.8, 1, 1.2, 1.6].map((scale) =>
            many(M.map((row) => row.map((v) => v * (recipe.mechanism === "residual" ? 1 : scale)))),
          ),
        ),
        contribution: pack(M.map((row) => row.map((v) => Math.abs(v) * 2))),
        share: pack(share),
        weights_mean: listed ? pack(range(groups).map(() => listed.weights)) : null,
        values_mean: recipe.kv ? pack([values, jitter(values, 0.5)]) : null,
      },
      table,
    },
  };
}

function jitterAll(matrix: Matrix, random: () => number): Matrix {
  return matrix.map((row) => {
    const moved = row.map((v) => v * (0.6 + 0.8 * random()));
    const sum = moved.reduce((a, b) => a + b, 0) || 1;
    return moved.map((v) => v / sum);
  });
}
