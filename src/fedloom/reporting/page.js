"use strict";
// one tier at a time; without this script all are shown
for (const choice of document.querySelectorAll('input[name="tier"]')) {
  choice.addEventListener("change", () => {
    for (const part of document.querySelectorAll("[data-tier]")) {
      part.classList.toggle("other-tier", choice.value !== "" && part.dataset.tier !== choice.value);
    }
  });
}
