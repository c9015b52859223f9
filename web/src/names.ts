// Names of rows (readers), columns (sources) and mechanisms.
import type { Run } from "./types";

const KINDS: Record<string, string> = { attn: "attention", mlp: "MLP", out: "head" };

export function kindName(kind: string | undefined): string {
  return kind === undefined ? "head" : (KINDS[kind] ?? kind);
}

/** Row r belongs to sublayer r + 1, the last to the head. */
export function readerName(kinds: string[], row: number): string {
  return row >= kinds.length ? "the head" : `sublayer ${row + 1} (${kindName(kinds[row])})`;
}

export function readerLabel(kinds: string[], row: number): string {
  return row >= kinds.length ? "head" : String(row + 1);
}

/** Column i belongs to the output of sublayer i; 0 is the embedding. */
export function outputName(kinds: string[], column: number): string {
  return column === 0 ? "the embedding" : `output ${column} (${kindName(kinds[column - 1])})`;
}

export function outputLabel(column: number): string {
  return column === 0 ? "emb" : String(column);
}

export function mechanismName(run: Run): string {
  return run.kv_mechanism ? `${run.mechanism} + ${run.kv_mechanism}` : run.mechanism;
}

/** Options as "heads = 4, window = none". */
export function optionsText(run: Run): string {
  return Object.entries(run.options ?? {})
    .map(([key, value]) => `${key} = ${value ?? "none"}`)
    .join(", ");
}
