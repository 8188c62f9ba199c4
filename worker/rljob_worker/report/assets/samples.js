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

  function field(list, name, text, className) {
    list.append(element("dt", name), element("dd", text, className));
  }

  // A token by how likely the engine found it: the redder, the less.
  function coloured(sample) {
    const shown = element("dd");
    for (const [text, logprob] of sample.tokens) {
      const piece = element("span", text, "token");
      piece.style.backgroundColor = `rgba(214, 39, 40, ${Math.min(0.7, -logprob / 8).toFixed(3)})`;
      piece.title = `log-probability ${short(logprob)}`;
      shown.append(piece);
    }
    return shown;
  }

  function turns(list, sample) {
    sample.turns.forEach((turn, index) => {
      field(list, `turn ${index + 1} action`, `${turn.action}\n(${turn.tokens} tokens, reward ${short(turn.reward)})`);
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
    else if (sample.tokens) list.append(element("dt", "response"), coloured(sample));
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
    if (!(step in loaded)) {
      try {
        loaded[step] = (await ask(`samples.json?step=${step}`)).content;
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
    if (!place || !steps.length) return;
    const form = element("form");
    const labelled = (text, input) => {
      const label = element("label", `${text} `);
      label.append(input);
      form.append(label);
      return input;
    };
    controls = { step: element("select"), order: element("select"), text: element("input"), count: element("span"), list: element("div") };
    labelled("step", controls.step);
    controls.order.append(option("written", "as sampled"), option("worst", "lowest reward first"), option("best", "highest reward first"));
    labelled("order", controls.order);
    controls.text.type = "search";
    labelled("containing", controls.text);
    const move = (text, by) => {
      const button = element("button", text);
      button.type = "button";
      button.addEventListener("click", () => { first += by; show(); });
      form.append(button);
    };
    move("previous", -PAGE);
    move("next", PAGE);
    form.append(controls.count);
    for (const input of [controls.step, controls.order, controls.text]) input.addEventListener("input", () => { first = 0; show(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    place.replaceChildren(form, ...(content.samples.note ? [element("p", content.samples.note)] : []), controls.list);
    offerSteps();
    show();
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
  build();
  if (content.live) follow(content.version);
  document.documentElement.dataset.ready = "true";
})();
