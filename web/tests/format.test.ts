import { describe, expect, it } from "vitest";
import { change, fileName, interval, loss, number, percent, plural, short, token, visible } from "../src/format";

describe("numbers", () => {
  it("have three significant digits, a real minus sign, and a dash where there is no value", () => {
    expect([1234567, 12345, 1.23456, -0.05, 0, 1e-5].map((value) => number(value))).toEqual([
      "1.2e6",
      "12,345",
      "1.23",
      "−0.05",
      "0",
      "1e−5",
    ]);
    expect([null, undefined, NaN, Infinity].map((value) => number(value))).toEqual(["–", "–", "–", "∞"]);
  });

  it("carry their sign where they are a change", () => {
    expect([0.5, -0.0213, 0, 0.00004, null].map(change)).toEqual(["+0.500", "−0.0213", "0", "+4.0e−5", "–"]);
    expect(interval({ mean: 0.1, low: -0.05, high: 0.2 })).toBe("+0.100 (−0.0500 to +0.200)");
    expect(interval({ mean: 0.1, low: null, high: null })).toBe("+0.100");
  });

  it("count things", () => {
    expect([plural(1, "token"), plural(1024, "token"), plural(0, "token")]).toEqual([
      "1 token",
      "1,024 tokens",
      "0 tokens",
    ]);
  });

  it("are short on axes", () => {
    expect([614400, 1.5e9, 12, -2000].map(short)).toEqual(["614k", "1.5B", "12", "−2k"]);
    expect([loss(1.5), percent(0.1234), percent(null)]).toEqual(["1.5000", "12.3 %", "–"]);
  });
});

describe("texts", () => {
  it("show control characters, terminal escapes and NUL as symbols", () => {
    expect(visible("a\u001b[31mb\u0000\n\t\u007f\u0085")).toBe("a␛[31mb␀⏎⇥␡⟨U+0085⟩");
  });

  it("name characters that would turn or hide text, and keep scripts and joined emoji", () => {
    expect(visible("\u202eabc\u202c\u200b")).toBe("⟨U+202E⟩abc⟨U+202C⟩⟨U+200B⟩");
    expect(visible("שלום 👩‍🔬")).toBe("שלום 👩‍🔬");
  });

  it("replace halves of surrogate pairs, which no XML file may contain", () => {
    expect(visible("\ud83d!\ude00")).toBe("\ufffd!\ufffd");
    expect(visible("😀")).toBe("😀");
  });

  it("leave markup as it is: it is only ever set as text", () => {
    expect(visible('<script>alert("1")</script>&amp;')).toBe('<script>alert("1")</script>&amp;');
  });

  it("show a token of white space, and only that", () => {
    expect([token("  "), token(" a b"), token("\n"), token(" \t"), token(""), token("\u0301")]).toEqual([
      "␣␣",
      " a b",
      "⏎",
      "␣⇥",
      "∅",
      "◌\u0301",
    ]);
  });

  it("make file names of letters, digits and dashes", () => {
    expect(fileName("matrix", "../<b> x\u0000 ü")).toBe("matrix-b-x");
    expect(fileName("\u202e")).toBe("figure");
  });
});
