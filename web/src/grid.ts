// What a matrix shows: values with names of rows and columns, taken from a run for a chosen quantity.
import { kindName, outputLabel, outputName, readerLabel, readerName } from "./names";
import { grouped, part, unpack, type NumberArray } from "./packed";
import type { ScaleKind } from "./palette";
import { shorten } from "./format";
import type { Packed, Run, Snapshots, Sources, TensorName, Trace } from "./types";

export interface Grid {
  /** Rows and columns shown, as positions in the whole matrix. */
  rowIds: number[];
  columns: number;
  /** [rows of the whole matrix, columns], row-major. */
  values: Float32Array;
  readable: (row: number, column: number) => boolean;
  kind: ScaleKind;
  unit: string;
  axes: { rows: string; columns: string };
  row: { label: (row: number) => string; name: (row: number) => string; kind?: (row: number) => string };
  column: { label: (column: number) => string; name: (column: number) => string };
}

export type RowFilter = "all" | "attn" | "mlp";
export type Group = number | "mean";

export interface Quantity {
  value: string;
  label: string;
  /** What one cell says, for the sentence under the figure. */
  says: string;
}

export const QUANTITIES: Quantity[] = [
  {
    value: "M",
    label: "M (mean over tokens)",
    says: "the weight with which a reader takes in the output of a sublayer below it",
  },
  {
    value: "weights",
    label: "weights over sources",
    says: "the weight a reader gives to each source as the mechanism lists them (a block is one source)",
  },
  { value: "sd", label: "spread over tokens (sd of M)", says: "how far single tokens differ from the mean of M" },
  { value: "q0.05", label: "5 % quantile of M", says: "M of the token at the 5 % quantile, cell by cell" },
  { value: "q0.5", label: "median of M", says: "M of the median token, cell by cell" },
  { value: "q0.95", label: "95 % quantile of M", says: "M of the token at the 95 % quantile, cell by cell" },
  {
    value: "contribution",
    label: "contribution ‖M v‖",
    says: "the norm of what a source adds to a read, mean over tokens",
  },
  {
    value: "share",
    label: "cosine share",
    says: "the part of a read that points in the direction of a source's contribution; each row sums to 1",
  },
  {
    value: "values",
    label: "mixing of values (attention layers)",
    says: "how much of the raw value of an attention layer is in what another one caches",
  },
];

export function cellsOf(array: NumberArray): { rows: number; columns: number; values: Float32Array } {
  const [rows = 0, columns = 0] = array.shape;
  return { rows, columns, values: array.data };
}

export function rowIds(kinds: string[], rows: number, filter: RowFilter): number[] {
  return [...Array(rows).keys()].filter((row) => filter === "all" || kinds[row] === filter);
}

function hasNegative(values: Float32Array): boolean {
  return values.some((value) => value < 0);
}

/** Rows read outputs of sublayers: M and what has its shape. */
export function outputGrid(
  kinds: string[],
  array: NumberArray,
  kind: ScaleKind,
  unit: string,
  filter: RowFilter = "all",
): Grid {
  const { rows, columns, values } = cellsOf(array);
  return {
    rowIds: rowIds(kinds, rows, filter),
    columns,
    values,
    kind,
    unit,
    readable: (row, column) => column <= row,
    axes: { rows: "reader (sublayer)", columns: "source (output of sublayer)" },
    row: {
      label: (row) => readerLabel(kinds, row),
      name: (row) => readerName(kinds, row),
      kind: (row) => kindName(kinds[row]),
    },
    column: { label: outputLabel, name: (column) => outputName(kinds, column) },
  };
}

function sourceLabel(name: string, column: number): string {
  if (column === 0 && name === "embedding") return "emb";
  return /\d+$/.exec(name)?.[0] ?? shorten(name, 4);
}

/** Rows read the mechanism's own list of sources. */
export function sourceGrid(kinds: string[], array: NumberArray, sources: Sources, filter: RowFilter = "all"): Grid {
  const { rows, columns, values } = cellsOf(array);
  const read = sources.reads.map((list) => new Set(list));
  const name = (column: number): string => sources.source_names[column] ?? `source ${column}`;
  return {
    ...outputGrid(kinds, array, hasNegative(values) ? "diverging" : "sequential", "weight", filter),
    rowIds: rowIds(kinds, rows, filter),
    columns,
    readable: (row, column) => read[row]?.has(column) ?? false,
    axes: {
      rows: "reader (sublayer)",
      columns: sources.source_names.some((text) => text.startsWith("block")) ? "source (block)" : "source",
    },
    column: { label: (column) => sourceLabel(name(column), column), name },
  };
}

/** Rows and columns are attention layers. */
export function valueGrid(kinds: string[], array: NumberArray): Grid {
  const { rows, columns, values } = cellsOf(array);
  const places = kinds.flatMap((kind, index) => (kind === "attn" ? [index + 1] : []));
  const place = (layer: number): string => (places[layer] ? ` (sublayer ${places[layer]})` : "");
  return {
    rowIds: [...Array(rows).keys()],
    columns,
    values,
    unit: "share of the value",
    kind: hasNegative(values) ? "diverging" : "sequential",
    readable: (row, column) => column <= row,
    axes: { rows: "layer that caches", columns: "layer whose value is in it" },
    row: { label: (row) => String(row + 1), name: (row) => `attention layer ${row + 1}${place(row)}` },
    column: {
      label: (column) => String(column + 1),
      name: (column) => `attention layer ${column + 1}${place(column)}`,
    },
  };
}

const TENSORS: Record<string, TensorName> = {
  M: "M_mean",
  sd: "M_std",
  weights: "weights_mean",
  contribution: "contribution",
  share: "share",
  values: "values_mean",
};

function tensorOf(trace: Trace, quantity: string): NumberArray | null {
  const name: TensorName = quantity.startsWith("q") ? "M_quantiles" : (TENSORS[quantity] ?? "M_mean");
  const packed = trace.tensors[name];
  if (!packed) return null;
  const array = unpack(packed);
  if (name !== "M_quantiles") return array;
  const quantiles = trace.histogram?.quantiles ?? [0.05, 0.25, 0.5, 0.75, 0.95];
  const index = quantiles.indexOf(Number(quantity.slice(1)));
  return index < 0 ? null : part(array, index);
}

/** Number of groups, heads or key-value heads that a quantity of a run has. */
export function groupsOf(run: Run, quantity: string): number {
  const array = run.trace && tensorOf(run.trace, quantity);
  return array && array.shape.length === 3 ? (array.shape[0] ?? 1) : 1;
}

function fromArray(run: Run, array: NumberArray, sources: Sources, quantity: string, filter: RowFilter): Grid {
  if (quantity === "weights") return sourceGrid(run.kinds, array, sources, filter);
  if (quantity === "values") return valueGrid(run.kinds, array);
  const kind: ScaleKind = quantity === "sd" || quantity === "contribution" ? "sequential" : "diverging";
  const unit = { sd: "standard deviation", contribution: "norm", share: "share of the read" }[quantity] ?? "M";
  return outputGrid(run.kinds, array, kind, unit, filter);
}

/** The matrix of a trace, or null where the run has none for this quantity. */
export function traceGrid(run: Run, quantity: string, group: Group, filter: RowFilter = "all"): Grid | null {
  const array = run.trace && tensorOf(run.trace, quantity);
  if (!run.trace || !array) return null;
  const flat = array.shape.length === 3 ? grouped(array, group) : array;
  return fromArray(run, flat, run.trace, quantity, filter);
}

function snapshotTensor(snapshots: Snapshots, quantity: string): Packed | null {
  if (quantity === "M") return snapshots.M;
  if (quantity === "weights") return snapshots.weights;
  return quantity === "values" ? snapshots.values : null;
}

export function hasSnapshots(run: Run, quantity: string): boolean {
  return !!run.snapshots && run.snapshots.steps.length > 0 && !!snapshotTensor(run.snapshots, quantity);
}

export function snapshotGrid(run: Run, quantity: string, index: number, filter: RowFilter = "all"): Grid | null {
  const packed = run.snapshots && snapshotTensor(run.snapshots, quantity);
  if (!run.snapshots || !packed || index < 0) return null;
  return fromArray(run, part(unpack(packed), index), run.snapshots, quantity, filter);
}

/** Values that decide the colour scale. The first row has a single source and would outshine all others. */
export function scaleValues(grid: Grid): number[] {
  const values: number[] = [];
  for (const row of grid.rowIds) {
    if (row === 0 && grid.rowIds.length > 2) continue;
    for (let column = 0; column < grid.columns; column++) {
      const value = grid.values[row * grid.columns + column] ?? NaN;
      if (grid.readable(row, column) && Number.isFinite(value)) values.push(value);
    }
  }
  return values;
}
