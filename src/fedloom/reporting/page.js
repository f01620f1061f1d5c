"use strict";
// The page is complete without this script, which adds: values on hover and by arrow keys, arms, tiers and rounds that
// can be chosen, sections that print open, and updates in place while a run goes on.
(() => {
  let loaded = document.getElementById("page").innerHTML;  // before anything is added to it
  const $ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "status");
  tip.hidden = true;
  document.body.append(tip);
  const say = (text, x, y) => {
    tip.hidden = false;
    if (tip.textContent !== text) tip.textContent = text;
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = Math.max(4, x + 14 + wide > innerWidth ? x - wide - 14 : x + 14) + "px";
    tip.style.top = Math.max(4, y + 14 + high > innerHeight ? y - high - 10 : y + 14) + "px";
  };
  const hush = () => { tip.hidden = true; $(".crosshair").forEach((one) => one.remove()); };

  // --- values of curves: the nearest round of all curves that are shown
  const shown = (element) => !element.closest(".off");
  const inside = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const curves = (svg) => $("polyline[data-v]", svg).filter(shown).map((line) => ({
    line, label: line.dataset.label, values: line.dataset.v.split("|"), x: line.dataset.x.split(" ").map(Number),
    points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
  }));
  const read = (svg, at, show) => {
    const all = curves(svg);
    const places = [...new Set(all.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    if (!places.length) return;
    const place = places.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best));
    const lines = all.flatMap((one) => {
      const index = one.points.findIndex((point) => Math.abs(point[0] - place) < 0.6);
      return index < 0 ? [] : [{ text: `${one.label}  ${one.values[index]}`.trim(), y: one.points[index][1], x: one.x[index] }];
    }).sort((a, b) => a.y - b.y);
    $(".crosshair", svg).forEach((one) => one.remove());
    const cross = document.createElementNS(svg.namespaceURI, "path"), box = svg.viewBox.baseVal;
    cross.setAttribute("class", "crosshair");
    cross.setAttribute("d", `M${place} 8V${box.height - 40}`);
    svg.append(cross);
    const head = svg.dataset.rounds ? "round " : "";
    show([`${head}${lines[0].x}`, ...lines.slice(0, 12).map((one) => one.text), ...(lines.length > 12 ? ["…"] : [])].join("\n"), place, places);
  };

  // --- arms, tiers and rounds that are shown
  const state = { off: new Set(), from: null, to: null };
  const apply = () => {
    for (const element of $("[data-arm], [data-tier]")) {
      const { arm, tier } = element.dataset;
      element.classList.toggle("off", state.off.has("arm " + arm) || state.off.has("tier " + tier));
    }
    $("svg[data-rounds]").forEach(zoom);
  };
  const zoom = (svg) => {
    const [first, last, left, right] = svg.dataset.rounds.split(" ").map(Number);
    const low = Math.max(first, state.from ?? first), high = Math.min(last, state.to ?? last);
    if (!(high > low)) return;
    svg.dataset.shown = `${low} ${high}`;
    const move = (x) => left + ((x - first - low + first) / (high - low)) * (right - left);
    const back = (pixel) => first + ((pixel - left) / (right - left)) * (last - first);
    for (const mark of $("polyline, polygon, .mark", svg)) {
      mark.dataset.was ??= mark.getAttribute("points") ?? mark.getAttribute("transform");
      if (mark.hasAttribute("points")) {
        const points = mark.dataset.was.split(" ").map((pair) => pair.split(",").map(Number)).map(([x, y]) => [move(back(x)), y]);
        mark.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${y}`).join(" "));
      } else {
        const [, x, rest] = mark.dataset.was.match(/translate\((\S+) (.*)/);
        const at = move(back(Number(x)));
        mark.setAttribute("transform", `translate(${at.toFixed(1)} ${rest}`);
        mark.style.visibility = at < left - 1 || at > right + 1 ? "hidden" : "";
      }
    }
    clip(svg, left, right);
    const ticks = svg.querySelector(".x-ticks");
    if (!ticks) return;
    ticks.dataset.was ??= ticks.innerHTML;
    if (low === first && high === last) { ticks.innerHTML = ticks.dataset.was; return; }
    const step = Math.max(1, Math.ceil((high - low) / 6)), y = ticks.querySelector("text")?.getAttribute("y") ?? 0;
    ticks.innerHTML = Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, at) => Math.ceil(low) + at * step)
      .filter((round) => round <= high)
      .map((round) => `<text class="tick" x="${move(round).toFixed(1)}" y="${y}" text-anchor="middle">${round}</text>`).join("");
  };
  let clips = 0;
  const clip = (svg, left, right) => {
    if (svg.querySelector("clipPath")) return;
    const id = `clip-${++clips}`, mark = "#" + id, area = document.createElementNS(svg.namespaceURI, "clipPath"), box = document.createElementNS(svg.namespaceURI, "rect");
    area.id = id;
    for (const [name, value] of [["x", left - 2], ["y", 0], ["width", right - left + 4], ["height", svg.viewBox.baseVal.height]]) box.setAttribute(name, value);
    area.append(box);
    svg.append(area);
    $("polyline, polygon", svg).forEach((one) => one.setAttribute("clip-path", `url(${mark})`));
  };
  const rounds = (from, to) => {
    state.from = from; state.to = to;
    const first = document.querySelector('input[name="from"]'), last = document.querySelector('input[name="to"]');
    if (first) { first.value = from ?? first.min; last.value = to ?? last.max; }
    apply();
  };

  const prepare = () => {
    $(".panel svg title").filter((title) => title.parentNode.tagName !== "svg").forEach((title) => {
      title.parentNode.dataset.tip = title.textContent;  // shown at once, not after a second
      title.remove();
    });
    $(".panel svg").forEach((svg) => {
      if (!svg.querySelector("polyline[data-v]")) return;
      svg.tabIndex = 0;
      let place = 0, start = null;
      svg.addEventListener("pointermove", (event) => {
        const at = inside(svg, event).x;
        if (start !== null) { brush(svg, start, at); return; }
        read(svg, at, (text) => say(text, event.clientX, event.clientY));
      });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
        if (event.key === "Escape") { hush(); rounds(null, null); }
        if (!step) return;
        event.preventDefault();
        read(svg, place, (_, at, places) => {
          const next = places[Math.min(places.length - 1, Math.max(0, places.indexOf(at) + step))];
          place = tip.hidden && Math.abs(step) === 1 ? at : next;
        });
        const box = svg.getBoundingClientRect();
        read(svg, place, (text) => say(text, box.left + (place / svg.viewBox.baseVal.width) * box.width, box.top + 20));
      });
      svg.addEventListener("blur", hush);
      if (!svg.dataset.rounds) return;
      svg.addEventListener("pointerdown", (event) => { if (event.pointerType !== "touch") { start = inside(svg, event).x; svg.setPointerCapture(event.pointerId); } });
      svg.addEventListener("pointerup", (event) => {
        if (start === null) return;
        const [a, b] = [start, inside(svg, event).x].sort((one, two) => one - two);
        const [, , left, right] = svg.dataset.rounds.split(" ").map(Number);
        const [low, high] = (svg.dataset.shown ?? svg.dataset.rounds).split(" ").map(Number);
        start = null;
        $(".brush", svg).forEach((one) => one.remove());
        const round = (pixel) => low + ((pixel - left) / (right - left)) * (high - low);
        const from = Math.floor(round(Math.max(a, left))), to = Math.ceil(round(Math.min(b, right)));
        if (b - a > 12 && to > from) rounds(from, to);
      });
      svg.addEventListener("dblclick", () => rounds(null, null));
    });
    const bar = document.getElementById("toolbar");
    bar.hidden = false;
    for (const box of $('input[type="checkbox"]', bar)) {
      box.checked = !state.off.has(`${box.name} ${box.value}`);
      box.addEventListener("change", () => { state.off[box.checked ? "delete" : "add"](`${box.name} ${box.value}`); apply(); });
    }
    for (const box of $('input[type="number"]', bar)) {
      box.addEventListener("change", () => {
        const [from, to] = $('input[type="number"]', bar).map((one) => Number(one.value));
        if (to > from) rounds(from, to);
      });
    }
    const all = document.getElementById("open-all");
    all.addEventListener("click", () => {
      const open = $("details.section").some((one) => !one.open);
      $("details.section").forEach((one) => { one.open = open; });
      all.textContent = open ? "Close all" : "Open all";
      all.setAttribute("aria-pressed", String(open));
    });
    if (state.from !== null) rounds(state.from, state.to); else apply();
  };

  const brush = (svg, a, b) => {
    let area = svg.querySelector(".brush");
    if (!area) { area = document.createElementNS(svg.namespaceURI, "rect"); area.setAttribute("class", "brush"); svg.append(area); }
    area.setAttribute("x", Math.min(a, b)); area.setAttribute("width", Math.abs(a - b));
    area.setAttribute("y", 8); area.setAttribute("height", svg.viewBox.baseVal.height - 48);
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.("[data-tip]");
    if (mark) say(mark.dataset.tip, event.clientX, event.clientY);
    else if (!event.target.closest?.("svg[tabindex]")) hush();
  });
  const reveal = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  };
  addEventListener("hashchange", reveal);
  let closed = [];
  addEventListener("beforeprint", () => { closed = $("details.section:not([open])"); closed.forEach((one) => { one.open = true; }); });
  addEventListener("afterprint", () => closed.forEach((one) => { one.open = false; }));
  prepare();
  reveal();

  // --- a run that goes on: from a server the page replaces its content, from a file it reloads
  const seconds = Number(document.body.dataset.refresh);
  if (seconds && location.protocol.startsWith("http")) {
    let etag = null;
    const update = async () => {
      try {
        const answer = await fetch(location.pathname, { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          etag = answer.headers.get("ETag");
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          const content = page.getElementById("page").innerHTML;
          if (content !== loaded) {
            loaded = content;
            replace(page);
          }
          if (!page.body.dataset.refresh) return;
        }
      } catch { return; }  // the server has gone: what was shown last stays
      setTimeout(update, 1000 * seconds);
    };
    const replace = (page) => {
      const open = $("details[open]").map((one) => one.id).filter(Boolean);
      const focused = document.activeElement?.id;
      document.getElementById("page").replaceWith(page.getElementById("page"));
      document.title = page.title;
      open.forEach((id) => { const one = document.getElementById(id); if (one) one.open = true; });
      hush();
      prepare();
      if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    };
    setTimeout(update, 1000 * seconds);
  } else if (seconds) {
    const kept = JSON.parse(sessionStorage.getItem("fedloom") ?? "null");
    if (kept) { kept.open.forEach((id) => { const one = document.getElementById(id); if (one) one.open = true; }); scrollTo(0, kept.y); }
    setTimeout(() => {
      sessionStorage.setItem("fedloom", JSON.stringify({ open: $("details[open]").map((one) => one.id).filter(Boolean), y: scrollY }));
      location.reload();
    }, 1000 * seconds);
  }
})();
