// Starts the page on a server: asks for the token if the server needs one, then shows the views.
import { boot, server } from "/page/qkv.js";

const main = document.querySelector("main");
const form = document.querySelector("form");
const input = form.querySelector("input");
const note = form.querySelector("p");
const trouble = document.querySelector("[role=alert]");

async function start() {
  const token = sessionStorage.getItem("qkv-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const backend = server("/page", headers);
  form.hidden = trouble.hidden = true;
  try {
    boot(main, { views: await backend.call("views", {}), backend, host: "server" });
  } catch (error) {
    const asked = await fetch("/v1/databases", { headers }).catch(() => null);
    if (asked?.status === 401) {
      note.textContent = token ? "This token is not valid. Try again." : "This server needs a token.";
      sessionStorage.removeItem("qkv-token");
      form.hidden = false;
      input.focus();
    } else {
      trouble.querySelector("p").textContent = `The page cannot be loaded: ${error.message}`;
      trouble.hidden = false;
    }
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("qkv-token", input.value);
  input.value = "";
  void start();
});
trouble.querySelector("button").addEventListener("click", start);
void start();
