import { describe, expect, it } from "vitest";
import { makeDocument } from "../sample/make";
import { step } from "../src/matrix_parts";
import { outputGrid } from "../src/grid";
import { groupEdits, scaleOf, sourceScaled, withScale } from "../src/explorer/edits";
import { pairNext } from "../src/explorer/next";
import { readers } from "../src/explorer/route";
import { whyNoText } from "../src/explorer/text";
import { judge } from "../src/importance";
import { rankRoutes, routesOf } from "../src/routes";
import type { Effect } from "../src/types";

const SHARE = new Float32Array([1, 0, 0, 0.3, 0.7, 0, -0.6, 0.5, 0.9]);

describe("the strongest routes", () => {
  it("come by the size of their share, negative ones too, without the first reader", () => {
    const order = rankRoutes(3, SHARE, null, "share", false).map(({ row, source }) => `${source}→${row}`);
    expect(order).toEqual(["2→2", "1→1", "0→2", "1→2", "0→1"]);
  });

  it("leave out the newest source of each reader on demand", () => {
    expect(rankRoutes(3, SHARE, null, "share", true).map(({ row, source }) => `${source}→${row}`)).toEqual([
      "0→2",
      "1→2",
      "0→1",
    ]);
  });

  it("find the ablation of the same route", () => {
    const run = makeDocument("report").runs[1]!;
    const measured = routesOf(run, "share", true).filter((route) => route.effect);
    expect(measured.length).toBe(run.ablation!.effects.filter((effect) => effect.kind === "route").length);
    for (const route of measured) expect(route.effect!.name).toBe(`route ${route.source}→${route.row + 1}`);
  });
});

function cut(mass: number, low: number | null, high: number | null, controls: number[] | null): Effect {
  const loss = { mean: ((low ?? 0) + (high ?? 0)) / 2, low, high };
  return {
    name: "x",
    kind: "family",
    sources: null,
    row: null,
    source: null,
    edges: 1,
    mass,
    loss,
    kl: loss,
    controls: controls && { count: controls.length, loss: controls, kl: controls },
  };
}

describe("weight and importance", () => {
  it("are told apart by the interval against 0 and against the controls", () => {
    expect(judge(cut(0.5, 0.2, 0.3, [0.1, 0.15]))).toBe("matters");
    expect(judge(cut(0.5, -0.1, 0.1, [0.1]))).toBe("large weight but no effect");
    expect(judge(cut(0.02, 0.2, 0.3, [0.1]))).toBe("small weight but matters");
    expect(judge(cut(0.5, 0.05, 0.1, [0.2]))).toBe("no more than random cuts");
    expect(judge(cut(0.5, 0.05, 0.1, [0.08, 0.06]))).toBe("no more than random cuts");
    expect(judge(cut(0.5, 0.05, 0.3, [0.06, 0.1]))).toBe("not told apart from random cuts");
    expect(judge(cut(0.5, -0.2, -0.1, null))).toBe("harmful");
    expect(judge(cut(0.5, null, null, null))).toBe("undecided");
  });
});

describe("the cursor of a matrix", () => {
  const grid = outputGrid(["attn", "mlp"], { shape: [3, 3], data: SHARE }, "diverging", "M");

  it("stays among the cells that are read", () => {
    expect(step(grid, { row: 2, column: 2 }, "ArrowUp")).toEqual({ row: 1, column: 1 });
    expect(step(grid, { row: 0, column: 0 }, "ArrowRight")).toEqual({ row: 0, column: 0 });
    expect(step(grid, { row: 2, column: 0 }, "End")).toEqual({ row: 2, column: 2 });
    expect(step(grid, { row: 2, column: 0 }, "a")).toBeNull();
  });
});

describe("edits", () => {
  it("keep one scale for each route and vanish at 1", () => {
    const once = withScale(withScale([], 3, 1, 0), 3, 1, 0.5);
    expect(once).toEqual([{ row: 3, source: 1, scale: 0.5 }]);
    expect(scaleOf(once, 3, 1)).toBe(0.5);
    expect(withScale(once, 3, 1, 1)).toEqual([]);
  });

  it("list a source that is cut everywhere as one entry", () => {
    const all = withScale(sourceScaled([], [2, 3, 4], 2, 0), 4, 1, 2);
    expect(groupEdits(all, () => [2, 3, 4])).toEqual([
      { source: 2, row: null, scale: 0 },
      { row: 4, source: 1, scale: 2 },
    ]);
  });
});

describe("a cut everywhere", () => {
  const grid = outputGrid(["attn", "mlp"], { shape: [3, 3], data: SHARE }, "diverging", "M");

  it("leaves out the row that reads nothing else", () => {
    expect(readers(grid, 0)).toEqual([1, 2]);
    expect(readers(grid, 2)).toEqual([2]);
  });

  it("hides no edit of a row that it leaves out", () => {
    const all = withScale(sourceScaled([], [1, 2], 0, 0), 0, 0, 0.5);
    expect(groupEdits(all, (source) => readers(grid, source))).toEqual([
      { source: 0, row: null, scale: 0 },
      { row: 0, source: 0, scale: 0.5 },
    ]);
  });
});

describe("a chosen file", () => {
  it("is refused by name if it is no text", () => {
    expect(whyNoText("a.txt", "def f(): pass 🦊 ü")).toBeNull();
    expect(whyNoText("a.txt", "")).toBeNull();
    expect(whyNoText("photo.png", "x\0y")).toContain("photo.png");
    expect(whyNoText("photo.png", `${"x".repeat(97)}\ufffd\ufffd`)).toContain("photo.png");
    expect(whyNoText("old.txt", `${"x".repeat(100)}\ufffd`)).toBeNull();
  });
});

describe("next tokens", () => {
  it("pair by id, the highest of either list first, and mark what was not sent", () => {
    const before = [
      { id: 1, text: "a", probability: 0.6 },
      { id: 2, text: "b", probability: 0.1 },
    ];
    const after = [
      { id: 3, text: "c", probability: 0.7 },
      { id: 1, text: "a", probability: 0.2 },
    ];
    expect(pairNext(before, after)).toEqual([
      { text: "c", before: null, after: 0.7 },
      { text: "a", before: 0.6, after: 0.2 },
      { text: "b", before: 0.1, after: null },
    ]);
  });
});
