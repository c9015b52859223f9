// The live panel of the explorer: a text, one run or two, and the run button.
import { bar, button, select, toggle } from "../controls";
import { el, replace, type Child } from "../dom";
import { number, visible } from "../format";
import { named, type Section } from "../section";
import type { PageDocument } from "../types";
import { client, type Client } from "./client";
import { column, type Column } from "./column";

const LIMIT = 100_000;
const TYPING = 600;
const EDITING = 180;
const START = "def read(self, state):\n    return self.combine(state, self.coeff(state))\n";

interface Place {
  column: Column;
  client: Client;
}

interface State {
  text: string;
  /** Position chosen by the reader; null is the last token. */
  token: number | null;
  renormalise: boolean;
  places: Place[];
}

function fileInput(load: (text: string) => void, complain: (message: string) => void): HTMLElement {
  const input = el("input", {
    type: "file",
    id: "explorer-file",
    accept: "text/*,.py,.md,.json,.txt,.toml",
    "data-test": "explorer-file",
  });
  input.addEventListener("change", async () => {
    const file = input.files?.[0];
    if (!file) return;
    if (file.size > LIMIT)
      complain(
        `${visible(file.name)} has ${number(file.size / 1000)} kB; the explorer takes files of at most ${LIMIT / 1000} kB. Copy a part of it into the text field.`,
      );
    else load(await file.text());
    input.value = "";
  });
  return el("div", { class: "control" }, el("label", { for: "explorer-file" }, "or pick a file"), input);
}

function draw(page: PageDocument): Child[] {
  const runs = named(page);
  const state: State = { text: START, token: null, renormalise: false, places: [] };
  const alertBox = el("div", { role: "alert" });
  const status = el("p", { class: "status", role: "status", "data-test": "explorer-status" });
  const columns = el("div", { class: "compare" });
  let timer = 0;
  const complain = (message: string | null): void =>
    replace(alertBox, message ? el("p", { class: "error", "data-test": "explorer-error" }, visible(message)) : null);

  const ask = async (place: Place): Promise<void> => {
    const answer = await place.client.run({
      ...place.column.request(),
      text: state.text,
      renormalise: state.renormalise,
      token: state.token,
    });
    if (!answer || !state.places.includes(place)) return;
    place.column.show(answer, state.token ?? answer.table.tokens.length - 1);
    const length = answer.table.tokens.length;
    status.textContent =
      length === 0 ? "The text has no tokens." : `${length} tokens in ${number(answer.seconds, 2)} s.`;
  };
  const send = async (): Promise<void> => {
    window.clearTimeout(timer);
    complain(null);
    if (!state.text) {
      status.textContent = "Type a text, or pick a file.";
      return;
    }
    status.textContent = "Running …";
    try {
      await Promise.all(state.places.map(ask));
    } catch (error) {
      status.textContent = "";
      complain((error as Error).message);
    }
  };
  const soon = (wait: number): void => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => void send(), wait);
  };
  const place = (index: number): Place => {
    const each = runs[index]!;
    return {
      client: client(),
      column: column(each, {
        changed: () => soon(EDITING),
        chooseToken: (token) => {
          if (token === state.token) return;
          state.token = token;
          state.places.forEach((other) => other.column.chooseToken(token));
          soon(EDITING);
        },
      }),
    };
  };
  const setRun = (at: number, value: string): void => {
    const others = state.places.filter((_, index) => index !== at);
    state.places =
      value === ""
        ? others
        : at === 0
          ? [place(Number(value)), ...others]
          : [...state.places.slice(0, 1), place(Number(value))];
    replace(columns, ...state.places.map((each) => each.column.node));
    void send();
  };
  const box = el("textarea", {
    id: "explorer-text",
    rows: 5,
    spellcheck: "false",
    dir: "auto",
    "data-test": "explorer-text",
  });
  box.value = state.text;
  const setText = (text: string): void => {
    state.text = text;
    state.token = null;
    if (box.value !== text) box.value = text;
  };
  box.addEventListener("input", () => {
    setText(box.value);
    soon(TYPING);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void send();
  });
  const options = runs.map(({ run, index }) => ({ value: String(index), label: run.name }));
  const form = el(
    "form",
    { "aria-label": "Text and run" },
    el("div", {}, el("label", { for: "explorer-text" }, "Text"), box),
    bar(
      select("Run", options, "0", (value) => setRun(0, value), "explorer-run-select").node,
      runs.length > 1
        ? select(
            "Compare with",
            [{ value: "", label: "nothing" }, ...options],
            "",
            (value) => setRun(1, value),
            "explorer-compare",
          ).node
        : null,
      toggle(
        "renormalise rows after a cut",
        false,
        (on) => {
          state.renormalise = on;
          soon(EDITING);
        },
        "renormalise",
      ),
      fileInput((text) => {
        setText(text);
        void send();
      }, complain),
    ),
    bar(
      button("Run", () => void send(), "primary", "explorer-run"),
      el("span", { class: "hint" }, "Runs by itself shortly after each change. Ctrl+Enter runs at once."),
    ),
    status,
    alertBox,
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  setRun(0, "0");
  return [el("div", { class: "card" }, form), columns];
}

export const explorer: Section = {
  id: "explorer",
  label: "Explorer",
  title: "Explorer",
  intro: "Type a text, choose a token, cut a route and see what changes.",
  draw: (page) =>
    page.runs.length
      ? draw(page)
      : [el("p", { class: "absent" }, "No run was opened. Start depthmix explore with the folder of a run.")],
};
