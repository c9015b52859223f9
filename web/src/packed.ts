// Packed arrays: base64 to numbers, and slices of their leading axes.
import type { Packed } from "./types";

export interface NumberArray {
  shape: number[];
  data: Float32Array;
}

const decoded = new WeakMap<Packed, NumberArray>();

/** One IEEE half-precision number from its 16 bits. */
export function halfToNumber(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function bytesOf(base64: string): DataView {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new DataView(bytes.buffer);
}

/** Decodes an array once; later calls with the same object return the same result. */
export function unpack(packed: Packed): NumberArray {
  const known = decoded.get(packed);
  if (known) return known;
  const view = bytesOf(packed.data);
  const width = { f32: 4, f16: 2, u8: 1 }[packed.dtype];
  if (!width) throw new Error(`a packed array has dtype ${packed.dtype}; expected f32, f16 or u8`);
  const count = packed.shape.reduce((product, size) => product * size, 1);
  if (view.byteLength !== count * width) {
    throw new Error(
      `a packed array of shape ${packed.shape.join("×")} has ${view.byteLength} bytes; expected ${count * width}`,
    );
  }
  const data = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    if (width === 4) data[i] = view.getFloat32(4 * i, true);
    else data[i] = width === 2 ? halfToNumber(view.getUint16(2 * i, true)) : view.getUint8(i);
  }
  const array = { shape: packed.shape, data };
  decoded.set(packed, array);
  return array;
}

/** The part at fixed positions of the leading axes. */
export function part(array: NumberArray, ...indices: number[]): NumberArray {
  const shape = array.shape.slice(indices.length);
  const size = shape.reduce((product, length) => product * length, 1);
  let offset = 0;
  indices.forEach((index, axis) => {
    const length = array.shape[axis] ?? 0;
    if (index < 0 || index >= length) throw new RangeError(`index ${index} is outside an axis of length ${length}`);
    offset = offset * length + index;
  });
  return { shape, data: array.data.subarray(offset * size, (offset + 1) * size) };
}

/** The mean over the first axis; places without a value in any slice stay without one. */
export function meanOfFirst(array: NumberArray): NumberArray {
  const groups = array.shape[0] ?? 1;
  if (groups === 1) return part(array, 0);
  const shape = array.shape.slice(1);
  const size = array.data.length / groups;
  const data = new Float32Array(size);
  for (let i = 0; i < size; i++) {
    let sum = 0;
    for (let g = 0; g < groups; g++) sum += array.data[g * size + i] ?? NaN;
    data[i] = sum / groups;
  }
  return { shape, data };
}

/** One slice of the first axis, or the mean over it for "mean". */
export function grouped(array: NumberArray, group: number | "mean"): NumberArray {
  return group === "mean" ? meanOfFirst(array) : part(array, Math.min(group, (array.shape[0] ?? 1) - 1));
}
