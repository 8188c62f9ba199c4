"use strict";
// The samples of a report, page by page, and the loop that asks a served page's run for news.
(() => {
  const { element, short, byId } = report;
  const PAGE = 10;
  const content = JSON.parse(byId("data").textContent);
  const token = new URLSearchParams(location.search).get("token");
  let steps = content.samples.steps;
  let loaded = content.samples.rows;
  let first = 0;
  let controls = null;

  async function ask(path, known) {
    const headers = { Authorization: `Bearer ${token}` };
    if (known) headers["If-None-Match"] = known;
    const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(30000) });
    if (answer.status === 304) return null;
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 200));
    return { version: answer.headers.get("ETag"), content: await answer.json() };
  }

  // Samples that the page brings: JSON, by gzip, in base64. They are unpacked when their step is shown.
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    // Not a Blob's stream, which another process of the browser reads.
    const packed = new ReadableStream({ start(to) { to.enqueue(bytes); to.close(); } });
    return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).json();
  }

  async function rowsOf(step) {
    const kept = loaded[step];
    if (kept === undefined) return (await ask(`samples.json?step=${step}`)).content;
    return typeof kept === "string" ? unpacked(kept) : kept;
  }

  function field(list, name, text, className) {
    list.append(element("dt", name), element("dd", text, className));
  }

  // How tokens may be coloured: the text that says so, from a token's numbers to [red, green, blue, strength 0 to 1].
  const [RED, BLUE] = [[203, 67, 20], [33, 102, 172]];
  const LEAST = 1e-4;
  const COLOURS = {
    likely: {
      label: "by the engine's log-probability",
      of: (engine) => [...RED, Math.min(1, -engine / 8)],
      legend: [["likely", [...RED, 0]], ["log-probability -4", [...RED, 0.5]], ["-8 or less", [...RED, 1]]],
    },
    mismatch: {
      label: "by the difference of trainer and engine",
      of: (engine, difference) => [...(difference < 0 ? RED : BLUE), apart(difference)],
      legend: [["trainer less likely by 1 or more", [...RED, 1]], ["by 0.01", [...RED, 0.5]], ["equal within 0.0001", [...RED, 0]], ["trainer more likely by 0.01", [...BLUE, 0.5]], ["by 1 or more", [...BLUE, 1]]],
    },
  };

  function apart(difference) {
    const size = Math.abs(difference);
    return difference === null || size <= LEAST ? 0 : Math.min(1, Math.log10(size / LEAST) / 4);
  }

  // Never so dark that black text on it is hard to read.
  const filled = ([red, green, blue, strength]) => (strength ? `rgba(${red}, ${green}, ${blue}, ${(0.65 * strength).toFixed(3)})` : "");

  function numbers([text, engine, difference], at, count) {
    const told = [`token ${at + 1} of ${count}: ${JSON.stringify(text)}`, `engine ${short(engine)}`];
    if (difference === null) told.push("trainer: not trained on");
    else told.push(`trainer ${short(engine + difference)}`, `difference ${short(difference)}`, `ratio ${short(Math.exp(difference))}`);
    return told.join(", ");
  }

  // Tokens of one answer, whose numbers a pointer or the arrow keys show in the line below.
  function coloured(tokens, missing) {
    const { of } = COLOURS[controls.colours.value];
    const box = element("dd", undefined, "tokens");
    const text = element("div", undefined, "pieces");
    const line = element("output");
    let current = -1;
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `${tokens.length} tokens: the arrow keys go from one to the next`);
    const point = (at) => {
      if (at < 0 || at >= tokens.length) return;
      if (current >= 0) text.children[current].classList.remove("current");
      current = at;
      text.children[at].classList.add("current");
      line.textContent = numbers(tokens[at], at, tokens.length);
    };
    tokens.forEach((token, at) => {
      const piece = element("span", token[0], "token");
      piece.style.backgroundColor = filled(of(token[1], token[2]));
      piece.dataset.at = at;
      text.append(piece);
    });
    if (missing > 0) text.append(`\n[... ${missing} further tokens, whose log-probabilities were not kept ...]`);
    text.addEventListener("pointerover", (event) => { if (event.target.dataset.at) point(Number(event.target.dataset.at)); });
    text.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: tokens.length - 1 };
      if (!(event.key in moves)) return;
      point(moves[event.key]);
      event.preventDefault();
    });
    box.append(text, line);
    return box;
  }

  function legend() {
    const place = controls.legend;
    place.replaceChildren();
    if (!(controls.colours.value in COLOURS)) return;
    for (const [label, color] of COLOURS[controls.colours.value].legend) {
      const piece = element("span", label, "token");
      piece.style.backgroundColor = filled(color);
      place.append(piece, " ");
    }
  }

  const tokensOf = (sample) => (controls.colours.value in COLOURS ? sample.tokens : undefined);

  function turns(list, sample) {
    const tokens = tokensOf(sample);
    let first = 0;
    sample.turns.forEach((turn, index) => {
      const name = `turn ${index + 1} action`;
      const stream = turn.stream === undefined ? "" : ` of stream ${turn.stream}`;
      const about = `(${turn.tokens} tokens${stream}, reward ${short(turn.reward)})`;
      const own = tokens ? tokens.slice(first, first + turn.tokens) : [];
      first += turn.tokens;
      if (own.length) {
        list.append(element("dt", name), coloured(own, turn.tokens - own.length));
        field(list, "", about);
      } else field(list, name, `${turn.action}\n${about}`);
      if (turn.error) field(list, "failed", turn.error, "failed");
      else if (!turn.done) field(list, "observation", turn.observation);
    });
  }

  function shown(sample) {
    const box = element("article");
    const head = element("header");
    head.append(element("strong", `reward ${short(sample.reward)}`), element("span", `${sample.prompt_uid} sample ${sample.sample}`));
    if (sample.source) head.append(element("span", sample.source));
    head.append(element("span", `advantage ${short(sample.advantage)}`), element("span", `${sample.response_tokens} tokens (${sample.finish_reason})`));
    head.append(element("span", `weights ${sample.weights}`));
    if (sample.decision !== "trained") head.append(element("span", sample.decision));
    const list = element("dl");
    field(list, "prompt", sample.prompt);
    if (sample.turns) turns(list, sample);
    else if (tokensOf(sample)) list.append(element("dt", "response"), coloured(sample.tokens, sample.response_tokens - sample.tokens.length));
    else field(list, "response", sample.response);
    if (sample.label !== null) field(list, "label", sample.label);
    for (const [name, value] of Object.entries(sample.reward_parts)) field(list, name, short(value));
    for (const [name, note] of Object.entries(sample.reward_notes)) field(list, `${name} wrote`, note);
    if (sample.reward_error) field(list, "reward failed", sample.reward_error, "failed");
    box.append(head, list);
    return box;
  }

  function chosen(rows) {
    const wanted = controls.text.value.toLowerCase();
    const texts = (sample) => [sample.prompt, sample.response, sample.label || "", ...(sample.turns || []).map((turn) => turn.observation || "")];
    const kept = wanted ? rows.filter((sample) => texts(sample).some((text) => text.toLowerCase().includes(wanted))) : rows.slice();
    const reward = (sample) => (sample.reward === null ? -Infinity : sample.reward);
    if (controls.order.value === "worst") kept.sort((a, b) => reward(a) - reward(b));
    if (controls.order.value === "best") kept.sort((a, b) => reward(b) - reward(a));
    return kept;
  }

  async function show() {
    const step = controls.step.value;
    if (!Array.isArray(loaded[step])) {
      try {
        loaded[step] = await rowsOf(step);
      } catch (error) {
        controls.list.replaceChildren(element("p", `The samples of step ${step} cannot be read: ${error.message}`));
        return;
      }
      if (controls.step.value !== step) return;
    }
    const rows = chosen(loaded[step]);
    first = Math.max(0, Math.min(first, rows.length - 1));
    const page = rows.slice(first, first + PAGE);
    controls.count.textContent = rows.length ? `${first + 1} to ${first + page.length} of ${rows.length}` : "none";
    controls.colours.parentElement.hidden = !loaded[step].some((sample) => sample.tokens);
    legend();
    controls.list.replaceChildren(...page.map(shown));
  }

  function option(value, text) {
    const made = element("option", text === undefined ? value : text);
    made.value = value;
    return made;
  }

  function offerSteps() {
    const newest = controls.step.options.length ? controls.step.options[controls.step.options.length - 1].value : null;
    const stayed = controls.step.value !== newest ? controls.step.value : null;
    controls.step.replaceChildren(...steps.map((step) => option(String(step))));
    controls.step.value = stayed || String(steps[steps.length - 1]);
  }

  function build() {
    const place = byId("samples");
    if (!place || !steps.length) return null;
    const form = element("form");
    const labelled = (text, input) => {
      const label = element("label", `${text} `);
      label.append(input);
      form.append(label);
      return input;
    };
    controls = { step: element("select"), order: element("select"), text: element("input"), colours: element("select"), count: element("span"), legend: element("p", undefined, "legend"), list: element("div") };
    labelled("step", controls.step);
    controls.order.append(option("written", "as sampled"), option("worst", "lowest reward first"), option("best", "highest reward first"));
    labelled("order", controls.order);
    controls.text.type = "search";
    labelled("containing", controls.text);
    controls.colours.append(...Object.entries(COLOURS).map(([name, { label }]) => option(name, label)), option("plain", "as plain text"));
    labelled("tokens", controls.colours);
    const move = (text, by) => {
      const button = element("button", text);
      button.type = "button";
      button.addEventListener("click", () => { first += by; show(); });
      form.append(button);
    };
    move("previous", -PAGE);
    move("next", PAGE);
    form.append(controls.count);
    for (const input of [controls.step, controls.order, controls.text, controls.colours]) input.addEventListener("input", () => { first = 0; show(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    place.replaceChildren(form, ...(content.samples.note ? [element("p", content.samples.note)] : []), controls.legend, controls.list);
    offerSteps();
    return show();
  }

  // As often as the answers are quick: a long run must not keep the machine busy with its picture.
  async function follow(version) {
    const began = performance.now();
    try {
      const news = await ask("run.json", version);
      if (news) {
        version = news.version;
        report.load(news.content.runs);
        steps = news.content.samples.steps;
        if (controls) offerSteps(); else build();
        if (controls) show();
      }
      byId("state").textContent = "live";
    } catch (error) {
      byId("state").textContent = `no answer: ${error.message}`;
    }
    setTimeout(() => follow(version), Math.max(3000, 20 * (performance.now() - began)));
  }

  if (content.runs.length) {
    report.connect();
    report.load(content.runs);
  }
  const built = Promise.resolve(build());
  if (content.live) {
    byId("trace").href += `?token=${encodeURIComponent(token)}`;
    follow(content.version);
  }
  built.finally(() => { document.documentElement.dataset.ready = "true"; });
})();
