// The document that Python puts into the page. n = depth + 1 rows of M; G groups, H heads of weights, C sources,
// K key-value heads, N attention layers, S recordings, P snapshots, T tokens.

/** A base64 array, little-endian. NaN means "no value". */
export interface Packed {
  shape: number[];
  dtype: "f32" | "f16" | "u8";
  data: string;
}

export type Maybe = number | null;

export interface Sources {
  source_names: string[];
  reads: number[][];
  partial?: boolean[];
}

export interface TokenTable extends Sources {
  tokens: string[];
  loss: Maybe[];
  M: Packed;
  weights: Packed | null;
  values: Packed | null;
}

export interface Magnitudes {
  embedding_norm: Maybe;
  read_norm: Maybe[];
  output_norm: Maybe[];
  state_norm: (Maybe[] | Maybe)[];
  contribution: Maybe[];
  read_gradient_norm: Maybe[];
  gradient_norm: Maybe[];
  stream_distance: Maybe[] | null;
}

export interface Trace extends Sources {
  kind: "scalar" | "head" | "channel" | "operator";
  summary: string;
  channels: number[] | null;
  text: { source: string; sha256: string | null; context: number };
  tokens: number;
  loss: Maybe;
  samples: { rank: number; gradients: number; table: number };
  histogram?: { relative_error: number; absolute_error: number; quantiles: number[] };
  rows: { entropy: Maybe[]; entropy_std?: Maybe[]; locality: Maybe[]; embedding_share: Maybe[]; spread: Maybe[] };
  shares_of: string;
  sinks: Maybe[];
  rank: { mean: Maybe; max: Maybe; tolerance: number; declared: Maybe } | null;
  effective_rank: { mean: Maybe; std: Maybe } | null;
  magnitudes: Magnitudes | null;
  tensors: Partial<Record<TensorName, Packed | null>>;
  table: TokenTable | null;
  finite?: boolean;
}

export type TensorName =
  | "M_mean"
  | "M_std"
  | "M_quantiles"
  | "contribution"
  | "share"
  | "weights_mean"
  | "weights_std"
  | "values_mean";

export interface Interval {
  mean: number;
  low: Maybe;
  high: Maybe;
}

export interface Effect {
  name: string;
  kind: "family" | "source" | "route" | "value";
  sources: number[] | null;
  row: Maybe;
  source: Maybe;
  edges: number;
  mass: Maybe;
  loss: Interval;
  kl: Interval;
  controls: { count: number; loss: number[]; kl: number[] } | null;
}

export interface Ablation {
  tokens: number;
  rows: number;
  loss: number;
  renormalise: boolean;
  how: string;
  confidence: number;
  text?: { source: string; context: number };
  effects: Effect[];
}

export interface Curve {
  tokens: Maybe[];
  seconds: Maybe[];
  loss: Maybe[];
}

export interface Snapshots {
  steps: number[];
  tokens: number[];
  M: Packed;
  weights: Packed | null;
  values: Packed | null;
  source_names: string[];
  reads: number[][];
  partial?: boolean[];
}

export interface OverTraining {
  tokens: number[];
  steps: number[];
  series: Record<string, Packed | null | undefined>;
}

export interface Health {
  name: string;
  level: "good" | "notice" | "problem" | "unknown";
  figure: string;
  meaning: string;
  remedy: string;
}

export interface Run {
  name: string;
  mechanism: string;
  options: Record<string, unknown>;
  kv_mechanism: string | null;
  depth: number;
  kinds: string[];
  dim: number;
  seed: Maybe;
  finished: boolean;
  facts: [string, string][];
  hashes: Record<string, string | null>;
  curves: { train: Curve; validation: Curve } | null;
  over_training: OverTraining | null;
  snapshots: Snapshots | null;
  trace: Trace | null;
  ablation: Ablation | null;
  health: Health[];
  missing: string[];
}

export interface Table {
  headings: string[];
  cells: string[][];
  note?: string;
}

export interface Study {
  verdicts: string[];
  losses: Table | null;
  cost: Table | null;
  about: Record<string, string>;
}

export interface Finding {
  claim: string;
  verdict: "seen" | "not seen" | "unclear" | "opposite";
  figure: string;
  note: string;
}

export interface Pattern {
  block: string;
  full: string;
  correlation: Maybe;
  by_row: Maybe[];
}

export interface PageDocument {
  format: number;
  kind: "report" | "explorer";
  title: string;
  made: Record<string, string>;
  study: Study | null;
  findings: Finding[] | null;
  patterns: Pattern[] | null;
  runs: Run[];
}

export interface Edit {
  row: number;
  source: number;
  scale: number;
}

export interface RunRequest {
  run: number;
  text: string;
  edits: Edit[];
  value_edits: Edit[];
  renormalise: boolean;
  token: number | null;
}

export interface NextToken {
  id: number;
  text: string;
  probability: number;
}

export interface Outcome {
  loss: Maybe;
  token_loss: Maybe[];
  next: NextToken[];
}

export interface RunAnswer {
  table: TokenTable;
  plain: Outcome;
  edited: Outcome | null;
  how: string | null;
  seconds: number;
  truncated: number;
}
