// Embedded explorers follow the site's switch between light and dark.
const explorers = () => document.querySelectorAll("iframe.explorer");
const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");
const tell = (frame) => frame.contentWindow?.postMessage({theme: theme()}, "*");

document.addEventListener("load", (event) => event.target.matches?.("iframe.explorer") && tell(event.target), true);
new MutationObserver(() => explorers().forEach(tell)).observe(document.body, {attributeFilter: ["data-md-color-scheme"]});
explorers().forEach(tell);
