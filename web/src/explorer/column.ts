// One run of the explorer: its tokens, the matrix of one of them with editable routes, and what the edits change.
import { chart } from "../chart";
import { chips } from "../chips";
import { bar, choices, select, setOptions } from "../controls";
import { el, replace, userText } from "../dom";
import { figure, subject, type NamedRun } from "../figure";
import { change, ended, loss, plural, token } from "../format";
import { scaleValues, type Grid } from "../grid";
import { createMatrix } from "../matrix";
import { mechanismName } from "../names";
import { domainOf } from "../palette";
import { runCell } from "../sections/verdict";
import { tableQuantities, tokenGrid } from "../sections/tokens";
import type { Edit, RunAnswer, RunRequest } from "../types";
import { changeChart, changes } from "./changes";
import { showNext } from "./next";
import { routePanel } from "./route";

export interface ColumnHost {
  /** The edits of this column changed, which needs a new answer. */
  changed: (column: Column) => void;
  chooseToken: (index: number) => void;
}

export interface Column {
  node: HTMLElement;
  request: () => Pick<RunRequest, "run" | "edits" | "value_edits">;
  show: (answer: RunAnswer, token: number) => void;
  chooseToken: (index: number) => void;
  /** Takes over the edits of another column, those of values only if they fit. */
  adopt: (edits: Edit[], valueEdits: Edit[] | null) => void;
  /** What to say beside the edits; with `locked` there are none here. */
  editable: (note: string, locked: boolean) => void;
  /** Why the results shown are not those of the text, or null; and whether an answer is under way. */
  stale: (why: string | null, busy: boolean) => void;
}

interface State {
  answer: RunAnswer | null;
  token: number;
  quantity: string;
  colour: "loss" | "change";
  edits: Edit[];
  valueEdits: Edit[];
  locked: boolean;
}

function lossLine(answer: RunAnswer): HTMLElement {
  const { plain, edited } = answer;
  const item = (label: string, text: string, test: string): HTMLElement =>
    el("div", {}, el("span", {}, label), el("strong", { "data-test": test }, text));
  const difference = edited && edited.loss !== null && plain.loss !== null ? edited.loss - plain.loss : null;
  return el(
    "div",
    { class: "losses" },
    item(edited ? "loss before (nats per token)" : "loss (nats per token)", loss(plain.loss), "loss-before"),
    edited ? item("loss after", loss(edited.loss), "loss-after") : null,
    edited ? item("change", change(difference), "loss-change") : null,
  );
}

function remarks(answer: RunAnswer): HTMLElement {
  const cut =
    answer.truncated > 0
      ? ` The last ${plural(answer.truncated, "token")} of the text ${answer.truncated === 1 ? "is" : "are"} beyond the limit and ${answer.truncated === 1 ? "was" : "were"} left out.`
      : "";
  const alone =
    answer.table.tokens.length === 1 ? " There is no loss: with one token, nothing is predicted that is known." : "";
  return el("p", { class: "hint", "data-test": "how" }, answer.how ? userText(ended(answer.how)) : null, cut, alone);
}

export function column(each: NamedRun, host: ColumnHost): Column {
  const { run } = each;
  const state: State = {
    answer: null,
    token: 0,
    quantity: "M",
    colour: "loss",
    edits: [],
    valueEdits: [],
    locked: false,
  };
  const values = (): boolean => state.quantity === "values";
  const edits = (): Edit[] => (values() ? state.valueEdits : state.edits);
  const grid = (): Grid | null => state.answer && tokenGrid(run, state.answer.table, state.quantity, state.token);
  const setEdits = (next: Edit[]): void => {
    if (values()) state.valueEdits = next;
    else state.edits = next;
    refresh();
    host.changed(self);
  };
  const refresh = (): void => {
    panel.refresh(grid());
    outline();
    name();
  };
  const panel = routePanel({ edits, change: setEdits });
  const view = createMatrix({
    label: `Matrix of the chosen token of ${run.name}. Enter selects a route`,
    onSelect: (cursor) => {
      const now = grid();
      if (now && state.quantity !== "weights" && !state.locked) panel.select(now, cursor);
    },
    note: (cursor) => {
      const edit = edits().find(
        ({ row, source }) => state.quantity !== "weights" && row === cursor.row && source === cursor.column,
      );
      return edit ? `, edited to × ${edit.scale}` : "";
    },
  });
  const outline = (): void =>
    view.outline(
      state.quantity === "weights"
        ? []
        : edits().map(({ row, source, scale }) => ({ row, column: source, off: scale === 0 })),
    );
  const list = chips({ label: `Tokens as ${run.name} reads them`, choose: (index) => host.chooseToken(index) });
  const quantities = select(
    "Quantity",
    [{ value: "M", label: "M" }],
    "M",
    (value) => {
      state.quantity = value;
      redraw();
    },
    "explorer-quantity",
  );
  const colours = choices(
    "Colour of tokens",
    [
      { value: "loss", label: "loss" },
      { value: "change", label: "change by the edits" },
    ],
    "loss",
    (value) => {
      state.colour = value as State["colour"];
      paint();
    },
  );
  const matrixSubject = subject();
  const nextSubject = subject();
  const changeSubject = subject(run.name);
  /** What the figures show. */
  const name = (): void => {
    const place = `token ${state.token + 1}`;
    const edited = state.edits.length + state.valueEdits.length > 0;
    const quantity = quantities.select.selectedOptions[0]?.textContent ?? "";
    matrixSubject.set(run.name, quantity, place, edited ? "weights before the edits" : "");
    nextSubject.set(run.name, place, state.answer?.edited ? "before and after the edits" : "");
  };
  const editNote = el("p", { class: "hint", "data-test": "edit-note", hidden: true });
  const staleNote = el("p", { class: "stale-note", "data-test": "stale", role: "note", hidden: true });
  const totals = el("div", { "aria-live": "polite" });
  const nextBox = el("div", {});
  const nextTitle = el("p", { class: "says" });
  const perToken = chart(
    (width) => changeChart(width, state.answer!),
    () => "Bars: change of the loss of each token by the edits.",
  );
  const perTokenFigure = figure(
    {
      title: "Change of each token's loss",
      name: "change",
      subject: changeSubject,
      level: "h4",
      says: "Upwards: the edit makes the token harder to predict.",
    },
    perToken.node,
  );
  const paint = (): void => {
    if (!state.answer) return;
    const byChange = state.colour === "change" && state.answer.edited !== null;
    list.update(state.answer.table.tokens, byChange ? changes(state.answer) : state.answer.plain.token_loss, byChange);
    list.mark(state.token);
  };
  const redraw = (): void => {
    const now = grid();
    if (!now || !state.answer) return;
    view.update(now, domainOf(scaleValues(now), now.kind));
    outline();
    panel.node.hidden = state.quantity === "weights" || state.locked;
    panel.refresh(now);
    name();
    replace(
      nextTitle,
      `After token ${state.token + 1} `,
      el("bdi", { class: "chip plain" }, token(state.answer.table.tokens[state.token] ?? "")),
    );
  };
  const top = el("div", {}, totals, bar(colours), list.node);
  const left = el(
    "div",
    {},
    figure(
      {
        title: "What this token reads",
        name: "explorer-matrix",
        subject: matrixSubject,
        level: "h4",
        controls: bar(quantities.node),
        says: "Click a cell, or press Enter on it, to select that route.",
      },
      view.node,
    ),
    panel.node,
    editNote,
  );
  const right = el(
    "div",
    {},
    figure(
      {
        title: "Next token",
        name: "next",
        subject: nextSubject,
        level: "h4",
        says: "The most probable next tokens after the chosen one.",
      },
      nextTitle,
      nextBox,
    ),
    perTokenFigure,
  );
  const results = el(
    "div",
    { class: "results", hidden: true },
    staleNote,
    top,
    el("div", { class: "explorer-results" }, left, right),
  );
  const self: Column = {
    node: el(
      "div",
      { class: "explorer-column", "data-run": each.index },
      el(
        "h3",
        {},
        runCell(each),
        " ",
        mechanismName(run) === run.name ? null : el("small", {}, userText(mechanismName(run))),
      ),
      results,
    ),
    request: () => ({ run: each.index, edits: state.edits, value_edits: state.valueEdits }),
    chooseToken: (index) => {
      state.token = Math.min(index, (state.answer?.table.tokens.length ?? 1) - 1);
      list.mark(state.token);
      redraw();
    },
    show: (answer, chosen) => {
      results.hidden = answer.table.tokens.length === 0;
      if (results.hidden) return;
      state.answer = answer;
      state.token = Math.max(0, Math.min(chosen, answer.table.tokens.length - 1));
      const options = tableQuantities(answer.table).sort((a, b) => Number(b.value === "M") - Number(a.value === "M"));
      if (run.kv_mechanism && run.mechanism === "residual" && quantities.select.options.length === 1)
        state.quantity = "values";
      setOptions(quantities.select, options, state.quantity);
      state.quantity = quantities.select.value;
      replace(totals, lossLine(answer), remarks(answer));
      colours.hidden = !answer.edited;
      perTokenFigure.hidden = !answer.edited;
      paint();
      showNext(nextBox, answer.plain, answer.edited);
      redraw();
      if (answer.edited) perToken.redraw();
    },
    adopt: (list, valueList) => {
      state.edits = list;
      if (valueList) state.valueEdits = valueList;
      refresh();
    },
    editable: (note, locked) => {
      state.locked = locked;
      editNote.textContent = note;
      editNote.hidden = !note;
      panel.node.hidden = state.quantity === "weights" || locked;
    },
    stale: (why, busy) => {
      results.classList.toggle("stale", why !== null);
      results.setAttribute("aria-busy", busy ? "true" : "false");
      staleNote.hidden = why === null;
      staleNote.textContent = why ?? "";
    },
  };
  return self;
}
