"use strict";
// show one tier at a time; without this script all are shown
for (const button of document.querySelectorAll('input[name="tier"]')) {
  button.addEventListener("change", () => {
    for (const element of document.querySelectorAll("[data-tier]")) {
      element.classList.toggle("other-tier", button.value !== "" && element.dataset.tier !== button.value);
    }
  });
}
