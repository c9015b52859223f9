// Repeatable noise and packed arrays.
import type { Packed } from "../src/types";

export type Matrix = number[][];
type Nested = number | Nested[];

export function noise(seed: number): () => number {
  let state = (seed * 2654435761) >>> 0 || 1;
  return () => {
    state ^= state << 13;
    state ^= state >>> 17;
    state ^= state << 5;
    return (state >>> 0) / 2 ** 32;
  };
}

export function numberToHalf(value: number): number {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size < 2 ** -14) return sign | Math.round(size * 2 ** 24);
  const exponent = Math.min(15, Math.floor(Math.log2(size)));
  return sign | (((exponent + 15) << 10) + Math.round((size / 2 ** exponent - 1) * 1024));
}

function shapeOf(values: Nested): number[] {
  return Array.isArray(values) ? [values.length, ...shapeOf(values[0] ?? 0)] : [];
}

export function pack(values: Nested[], dtype: "f32" | "f16" = "f32"): Packed {
  const shape = shapeOf(values).slice(0);
  const flat = (values as unknown[]).flat(Infinity) as number[];
  const bytes = Buffer.alloc(flat.length * (dtype === "f32" ? 4 : 2));
  flat.forEach((value, index) => {
    if (dtype === "f32") bytes.writeFloatLE(value, 4 * index);
    else bytes.writeUInt16LE(numberToHalf(value), 2 * index);
  });
  return { shape, dtype, data: bytes.toString("base64") };
}
