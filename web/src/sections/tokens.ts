// What single tokens read: the text as chips, one token's row and its whole matrix.
import * as Plot from "@observablehq/plot";
import { chart } from "../chart";
import { chips } from "../chips";
import { bar, select, setOptions, type Option } from "../controls";
import { el, replace, userText } from "../dom";
import { figure, subject, type NamedRun } from "../figure";
import { loss, number, token } from "../format";
import { outputGrid, scaleValues, sourceGrid, traceGrid, valueGrid, type Grid } from "../grid";
import { createMatrix } from "../matrix";
import { grouped, part, unpack } from "../packed";
import { domainOf } from "../palette";
import { absent, mostTelling, named, type Section } from "../section";
import type { Run, TokenTable } from "../types";

/** One token's matrix of a table. */
export function tokenGrid(run: Run, table: TokenTable, quantity: string, index: number): Grid | null {
  const packed = quantity === "weights" ? table.weights : quantity === "values" ? table.values : table.M;
  if (!packed) return null;
  const flat = grouped(part(unpack(packed), index), "mean");
  if (quantity === "weights") return sourceGrid(run.kinds, flat, table);
  return quantity === "values" ? valueGrid(run.kinds, flat) : outputGrid(run.kinds, flat, "diverging", "M");
}

export function tableQuantities(table: TokenTable): Option[] {
  return [
    ...(table.weights ? [{ value: "weights", label: "weights over sources" }] : []),
    { value: "M", label: "M" },
    ...(table.values ? [{ value: "values", label: "mixing of values" }] : []),
  ];
}

interface Bar {
  column: number;
  label: string;
  name: string;
  value: number;
  mean: number;
}

function bars(grid: Grid, mean: Grid | null, row: number): Bar[] {
  return [...Array(grid.columns).keys()]
    .filter((column) => grid.readable(row, column))
    .map((column) => ({
      column,
      label: grid.column.label(column),
      name: grid.column.name(column),
      value: grid.values[row * grid.columns + column] ?? NaN,
      mean: mean?.values[row * grid.columns + column] ?? NaN,
    }));
}

function rowChart(width: number, data: Bar[], unit: string): Plot.PlotOptions {
  const labels = data.map((each) => each.label);
  const every = Math.ceil(labels.length / Math.max(1, (width - 70) / 24));
  const tick = { x: "column", stroke: "var(--ink)", strokeWidth: 2 };
  return {
    height: 250,
    marginLeft: 50,
    marginBottom: 38,
    x: {
      type: "band",
      domain: data.map((each) => each.column),
      label: "source",
      labelAnchor: "center",
      labelArrow: "none",
      tickSize: 0,
      ticks: data.filter((_, index) => index % every === 0).map((each) => each.column),
      tickFormat: (column: number) => data.find((each) => each.column === column)?.label ?? "",
    },
    y: { label: unit, grid: true, labelArrow: "none", ticks: 5, zero: true },
    marks: [
      Plot.ruleY([0], { stroke: "var(--line-strong)" }),
      Plot.barY(data, {
        x: "column",
        y: "value",
        fill: "var(--accent-fill)",
        insetLeft: 1,
        insetRight: 1,
        title: (each: Bar) => `${each.name}\nthis token: ${number(each.value)}\nmean: ${number(each.mean)}`,
        tip: { fill: "var(--card)", stroke: "var(--line-strong)" },
      }),
      Plot.tickY(
        data.filter((each) => Number.isFinite(each.mean)),
        { ...tick, y: "mean" },
      ),
    ],
  };
}

function draw(runs: NamedRun[]): HTMLElement[] {
  const first = mostTelling(runs);
  const state = { run: first.run, quantity: "", token: 0, row: 0 };
  const table = (): TokenTable => state.run.trace!.table!;
  const view = createMatrix({
    label: "Matrix of the chosen token",
    onMove: (cursor) => {
      if (cursor && cursor.row !== state.row) pickRow(cursor.row);
    },
  });
  const caption = el("p", { class: "says" });
  const list = chips({
    label: "Tokens of the text",
    choose: (index) => {
      state.token = index;
      redraw();
    },
  });
  const current = (): Bar[] => {
    const grid = tokenGrid(state.run, table(), state.quantity, state.token);
    return grid ? bars(grid, traceGrid(state.run, state.quantity, "mean"), state.row) : [];
  };
  const picture = chart(
    (width) => rowChart(width, current(), state.quantity === "M" ? "M" : "weight"),
    () =>
      `Bars: ${current()
        .map((each) => `${each.name} ${number(each.value)}`)
        .join(", ")}.`,
  );
  const rows = select(
    "Row (reader)",
    [],
    "",
    (value) => {
      state.row = Number(value);
      redraw();
    },
    "row-picker",
  );
  const quantities = select(
    "Quantity",
    [],
    "",
    (value) => {
      state.quantity = value;
      fillRows();
      redraw();
    },
    "token-quantity",
  );
  const pickRow = (row: number): void => {
    state.row = row;
    rows.select.value = String(row);
    redraw();
  };
  const rowSubject = subject();
  const matrixSubject = subject();
  const redraw = (): void => {
    const grid = tokenGrid(state.run, table(), state.quantity, state.token);
    if (!grid) return;
    const quantity = tableQuantities(table()).find(({ value }) => value === state.quantity)?.label ?? state.quantity;
    rowSubject.set(state.run.name, quantity, `token ${state.token + 1}`, grid.row.name(state.row));
    matrixSubject.set(state.run.name, quantity, `token ${state.token + 1}`);
    view.update(grid, domainOf(scaleValues(grid), grid.kind));
    const value = table().loss[state.token] ?? null;
    replace(
      caption,
      "Token ",
      el("strong", {}, String(state.token + 1)),
      " ",
      el("bdi", { class: "chip plain" }, token(table().tokens[state.token] ?? "")),
      value === null ? " (the first token has no loss)" : ` with a loss of ${loss(value)} nats`,
      ", read by ",
      grid.row.name(state.row),
      ".",
    );
    picture.redraw();
  };
  const fillRows = (): void => {
    const grid = tokenGrid(state.run, table(), state.quantity, 0);
    if (!grid) return;
    const options = grid.rowIds.map((row) => ({ value: String(row), label: grid.row.name(row) }));
    if (!options.some(({ value }) => Number(value) === state.row)) state.row = grid.rowIds.at(-1) ?? 0;
    setOptions(rows.select, options, String(state.row));
  };
  const source = el("p", { class: "hint" });
  const load = (): void => {
    const available = tableQuantities(table());
    const wanted = state.run.kv_mechanism && state.run.mechanism === "residual" ? "values" : state.quantity;
    setOptions(quantities.select, available, wanted);
    state.quantity = quantities.select.value;
    state.row = state.run.depth;
    state.token = Math.min(Math.max(1, state.token), table().tokens.length - 1);
    fillRows();
    replace(
      source,
      "The first tokens of the traced text (",
      userText(state.run.trace?.text.source ?? ""),
      "); a stronger shade is a higher loss. Choose a token by pointer or with the arrow keys.",
    );
    list.update(table().tokens, table().loss);
    list.choose(state.token);
  };
  const runPicker = select(
    "Run",
    runs.map(({ run, index }) => ({ value: String(index), label: run.name })),
    String(first.index),
    (value) => {
      state.run = runs.find(({ index }) => String(index) === value)!.run;
      load();
    },
    "token-run",
  );
  load();
  return [
    el(
      "div",
      { class: "card" },
      bar(runs.length > 1 ? runPicker.node : null, quantities.node, rows.node),
      list.node,
      source,
    ),
    el(
      "div",
      { class: "pair" },
      figure(
        {
          title: "One read of this token",
          name: "token-row",
          subject: rowSubject,
          says: "Bars are this token's weights over the sources of the chosen row; ticks are the mean over all tokens of the trace.",
        },
        caption,
        picture.node,
      ),
      figure(
        {
          title: "All reads of this token",
          name: "token-matrix",
          subject: matrixSubject,
          says: "The whole matrix of this token. Pointing at a row puts it into the bars.",
        },
        view.node,
      ),
    ),
  ];
}

export const tokensSection: Section = {
  id: "tokens",
  label: "Tokens",
  title: "What single tokens read",
  intro: "Do tokens read differently, and which?",
  draw: (page) => {
    const all = named(page);
    const has = (run: Run): boolean => !!run.trace?.table?.tokens.length;
    const note = absent(all, has, /trace|token/i, "no trace with single tokens was saved.");
    const runs = all.filter(({ run }) => has(run));
    return runs.length ? [...draw(runs), note] : [note];
  },
};
