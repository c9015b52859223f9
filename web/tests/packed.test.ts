import { describe, expect, it } from "vitest";
import { numberToHalf, pack } from "../sample/numbers";
import { grouped, halfToNumber, part, unpack } from "../src/packed";

describe("packed arrays", () => {
  it("read half precision as numpy writes it", () => {
    const known: [number, number][] = [
      [0x0000, 0],
      [0x3c00, 1],
      [0xc000, -2],
      [0x3555, 0.333251953125],
      [0x7bff, 65504],
      [0x0001, 2 ** -24],
      [0x0400, 2 ** -14],
      [0x7c00, Infinity],
      [0xfc00, -Infinity],
    ];
    for (const [bits, value] of known) expect(halfToNumber(bits)).toBe(value);
    expect(halfToNumber(0x7e00)).toBeNaN();
    expect(Object.is(halfToNumber(0x8000), -0)).toBe(true);
  });

  it("read every finite half-precision number back to the same bits", () => {
    for (let bits = 0; bits < 0x7c00; bits++) expect(numberToHalf(halfToNumber(bits))).toBe(bits);
  });

  it("are little-endian and keep NaN as no value", () => {
    expect([...unpack({ shape: [2], dtype: "f32", data: "AACAPwAAwH8=" }).data]).toEqual([1, NaN]);
    expect([...unpack({ shape: [3], dtype: "u8", data: "AAH/" }).data]).toEqual([0, 1, 255]);
  });

  it("say so when their bytes do not fit their shape", () => {
    expect(() => unpack({ shape: [3], dtype: "f32", data: "AACAPw==" })).toThrow("4 bytes; expected 12");
    expect(() => unpack({ shape: [1], dtype: "f64" as "f32", data: "" })).toThrow("dtype f64");
  });

  it("are cut along their leading axes and averaged over groups", () => {
    const array = unpack(
      pack(
        [
          [
            [1, 2],
            [3, 4],
          ],
          [
            [5, 6],
            [7, 8],
          ],
        ],
        "f16",
      ),
    );
    expect([...part(array, 1, 0).data]).toEqual([5, 6]);
    expect([...grouped(array, "mean").data]).toEqual([3, 4, 5, 6]);
    expect([...grouped(array, 1).data]).toEqual([5, 6, 7, 8]);
    expect(() => part(array, 2)).toThrow(RangeError);
  });
});
