// Sets the theme that the user chose, or else the system's, before the first paint. Not a module, so that it runs first.
"use strict";
{
  let chosen = null;
  try { chosen = localStorage.getItem("ftd-theme"); } catch { /* the browser stores nothing */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
