// Light or dark: the reader's system says, or the page that embeds this one, by the message {theme: "dark" or "light"}.
const DARK = "(prefers-color-scheme: dark)";
const darkRules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).filter((rule) => rule.conditionText === DARK);

function applyTheme(theme) {
  for (const rule of darkRules) rule.media.mediaText = theme === "dark" ? "all" : "not all";
  document.documentElement.style.colorScheme = theme;
  drawAll();
}

function followTheme() {
  matchMedia(DARK).addEventListener("change", drawAll);
  addEventListener("message", (event) => {
    const from = parent !== self && event.source === parent;
    if (from && (event.data?.theme === "dark" || event.data?.theme === "light")) applyTheme(event.data.theme);
  });
}
