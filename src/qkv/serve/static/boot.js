// The page under a server: it asks for a token where one is wanted, then shows what is served.
import { boot, server } from "/page/qkv.js";

const main = document.querySelector("main");
const form = document.querySelector("form");
const input = form.querySelector("input");
const note = form.querySelector("p");

async function start() {
  const token = sessionStorage.getItem("qkv-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const backend = server("/page", headers);
  const response = await fetch("/page/call/views", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: "{}",
  });
  if (response.status === 401) {
    note.textContent = token ? "This token is not the one. Try again." : "This server wants a token.";
    sessionStorage.removeItem("qkv-token");
    form.hidden = false;
    input.focus();
    return;
  }
  form.hidden = true;
  const views = await backend.call("views", {});
  boot(main, { views, backend, host: "server" });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("qkv-token", input.value);
  input.value = "";
  void start();
});
void start();
