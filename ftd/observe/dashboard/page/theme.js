// Before the first paint: the theme that was chosen here, or else the system's. Not a module, so that it comes first.
"use strict";
{
  let chosen = null;
  try { chosen = localStorage.getItem("ftd-theme"); } catch { /* a browser that keeps nothing */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
