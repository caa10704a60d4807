var W=Object.defineProperty;var j=(e,r)=>{for(var n in r)W(e,n,{get:r[n],enumerable:!0})};var L={};j(L,{softmax:()=>G});function G(e,r=1){let n=Float64Array.from(e,l=>l/r),t=Math.max(...n),o=n.map(l=>Math.exp(l-t)),i=o.reduce((l,c)=>l+c,0);return o.map(l=>l/i)}var J=new Set(["value","checked","disabled","selected","hidden","open"]);function Q(e,r,n){for(let[t,o]of Object.entries(r))if(o!=null)if(t==="on")for(let[i,l]of Object.entries(o))e.addEventListener(i,l);else if(t==="style"){let i=e.style;for(let[l,c]of Object.entries(o))i.setProperty(l,c)}else if(t==="test")e.setAttribute("data-testid",String(o));else if(J.has(t))e[t]=o;else{if(t.startsWith("on"))throw new Error(`${t}: a handler goes into on: { … }`);o===!0?e.setAttribute(t,""):o!==!1&&e.setAttribute(t,String(o))}return X(e,...n),"value"in r&&e instanceof HTMLSelectElement&&(e.value=String(r.value)),e}function s(e,r={},...n){return Q(document.createElement(e),r,n)}function X(e,...r){for(let n of r)n==null||n===!1||e.append(n instanceof Node?n:String(n))}var B=0;function T(e){return B+=1,`qkv-${e}-${B}`}function $(e,r=3){if(!Number.isFinite(e))return Number.isNaN(e)?"none":e>0?"∞":"−∞";let n=e.toFixed(r);return(Number(n)===0?n.replace("-",""):n).replace("-","−")}var P=`
:host {
  color-scheme: light dark;
  --paper: light-dark(#ffffff, #14181d);
  --raised: light-dark(#f5f7f9, #1c2229);
  --line: light-dark(#d9dfe5, #333c46);
  --ink: light-dark(#17202a, #e8edf2);
  --soft: light-dark(#566370, #9dabb9);
  --accent: light-dark(#1b62a5, #6cb2ea);
  --on-accent: light-dark(#ffffff, #0d1318);
  --second: light-dark(#b3540a, #f0a14a);
  --wash: light-dark(#e3eef9, #12293f);
  --bad: light-dark(#a1260d, #ff9b85);
  --gap: 1rem;
  --radius: 6px;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  display: block;
  container: page / inline-size;
  font: 400 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  color: var(--ink);
  background: var(--paper);
  text-align: start;
  -webkit-text-size-adjust: 100%;
}
:host([data-theme="light"]) { color-scheme: light; }
:host([data-theme="dark"]) { color-scheme: dark; }
*, *::before, *::after { box-sizing: border-box; }
[hidden] { display: none !important; }

.page { padding: clamp(0.75rem, 2.5cqi, 2.5rem); max-width: 110rem; margin: 0 auto; }
.top { display: flex; align-items: center; gap: 0.5rem 1rem; flex-wrap: wrap; border-bottom: 1px solid var(--line); margin-bottom: 1.5rem; }
.tabs { display: flex; flex: 1 1 auto; overflow-x: auto; gap: 0.25rem; margin-bottom: -1px; scrollbar-width: none; }
.tabs button { font: inherit; color: var(--soft); background: none; border: 0; border-bottom: 3px solid transparent; padding: 0.55rem 0.9rem; white-space: nowrap; cursor: pointer; border-radius: 0; }
.tabs button:hover { color: var(--ink); }
.tabs button[aria-selected="true"] { color: var(--ink); font-weight: 600; border-bottom-color: var(--accent); }
.theme { margin-inline-start: auto; }

h2 { font-size: 1.45rem; line-height: 1.25; font-weight: 650; margin: 0 0 0.25rem; }
h3 { font-size: 1.05rem; font-weight: 600; margin: 0 0 0.5rem; }
p { margin: 0 0 0.75rem; max-width: 70ch; }
.note, .hint { color: var(--soft); }
.hint { font-size: 0.85rem; }
.error { color: var(--bad); }
.formula { font-family: var(--mono); font-size: 0.95rem; overflow-wrap: anywhere; }
.number, td.number, th.number, output { font-variant-numeric: tabular-nums; }
.number { text-align: end; }

button, select, input, textarea { font: inherit; color: inherit; }
button { background: var(--paper); border: 1px solid var(--line); border-radius: var(--radius); padding: 0.35rem 0.8rem; cursor: pointer; }
button:hover { border-color: var(--soft); }
button.main { background: var(--accent); color: var(--on-accent); border-color: var(--accent); }
button.quiet { border-color: transparent; background: none; color: var(--soft); }
button.quiet:hover { color: var(--ink); border-color: var(--line); }
button:disabled { opacity: 0.5; cursor: default; }
select, input[type="text"], input[type="number"], input[type="search"], textarea {
  background: var(--paper); border: 1px solid var(--line); border-radius: var(--radius); padding: 0.4rem 0.6rem; width: 100%; min-width: 0;
}
input[type="range"] { width: 100%; accent-color: var(--accent); margin: 0.45rem 0; }
input[type="checkbox"], input[type="radio"] { accent-color: var(--accent); }
:is(button, select, input, textarea, [tabindex]):focus-visible { outline: 3px solid var(--accent); outline-offset: 1px; }
.tabs button:focus-visible { outline-offset: -3px; }

.field { display: flex; flex-direction: column; gap: 0.15rem; min-width: 0; }
.field > label, .field > .label { font-size: 0.85rem; color: var(--soft); }
.controls { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(11rem, 100%), 1fr)); gap: 0.75rem 1rem; align-items: end; margin-bottom: 1.25rem; }
.row { display: flex; flex-wrap: wrap; gap: 0.5rem 0.75rem; align-items: center; }
.panel { border: 1px solid var(--line); border-radius: var(--radius); padding: var(--gap); }
.scroll { overflow-x: auto; }

table { border-collapse: collapse; width: 100%; }
th { text-align: start; font-weight: 400; font-size: 0.85rem; color: var(--soft); padding: 0.25rem 0.6rem 0.25rem 0; }
td { padding: 0.25rem 0.6rem 0.25rem 0; border-top: 1px solid var(--line); vertical-align: middle; }
th.number { text-align: end; }

.bar { display: block; height: 0.85rem; background: var(--wash); border-radius: 2px; overflow: hidden; min-width: 3rem; }
.bar > i { display: block; height: 100%; background: var(--accent); transition: width 0.15s ease-out; }
.bar.second > i { background: var(--second); }
canvas { display: block; }

.heatmap { display: block; min-width: 0; accent-color: var(--accent); }
.heatmap > canvas { touch-action: pan-y; cursor: crosshair; }
.heatmap-foot { display: flex; flex-wrap: wrap; gap: 0.5rem 1.25rem; align-items: center; margin-top: 0.5rem; }
.heatmap-readout { flex: 1 1 14ch; font-variant-numeric: tabular-nums; white-space: pre-wrap; overflow-wrap: anywhere; }
.heatmap-scale { display: inline-flex; gap: 0.5rem; align-items: center; font-variant-numeric: tabular-nums; color: var(--soft); font-size: 0.85rem; }
.heatmap-bar { width: 7rem; height: 0.6rem; border: 1px solid var(--line); }
.heatmap-tools { display: inline-flex; gap: 0.25rem; }
.heatmap-tools button { min-width: 2rem; padding: 0.1rem 0.5rem; color: var(--soft); }
.heatmap-note { display: block; min-height: 1.4em; color: var(--soft); font-size: 0.85rem; }

.unseen { position: absolute; width: 1px; height: 1px; margin: -1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
@media (prefers-reduced-motion: reduce) { *, *::before { transition: none !important; animation: none !important; } }
@media (forced-colors: active) { .bar > i { forced-color-adjust: none; } }
`;var A=["auto","light","dark"];function N(e){let r=new CSSStyleSheet;return r.replaceSync(e),r}function k(e,r,n){let t=s("div");e.append(t);let o=t.attachShadow({mode:"open"});o.adoptedStyleSheets=[N(P),...n.flatMap(a=>a.style?[N(a.style)]:[])];let i=matchMedia("(prefers-color-scheme: dark)"),c=e.dataset.theme==="dark"||e.dataset.theme==="light"?e.dataset.theme:"auto",b=()=>c==="auto"?i.matches:c==="dark",V=s("div",{class:"unseen",role:"status","aria-live":"polite",test:"announce"}),d=[],w=()=>{c==="auto"?delete t.dataset.theme:t.dataset.theme=c,g.textContent={auto:"◐",light:"○",dark:"●"}[c],g.setAttribute("aria-label",`Theme: ${c}`),g.title=`Theme: ${c}`;for(let{panel:a}of d)a.dispatchEvent(new CustomEvent("theme"))},g=s("button",{class:"quiet theme",test:"theme",on:{click:()=>{c=A[(A.indexOf(c)+1)%A.length],w()}}}),S=(a,f=!1)=>{d.forEach(({tab:p,panel:m},h)=>{p.setAttribute("aria-selected",String(a===h)),p.tabIndex=a===h?0:-1,m.hidden=a!==h}),d[a].mount(),f&&d[a].tab.focus()},C=new Map;r.views.forEach((a,f)=>{let p=n.find(E=>E.name===a.view),m=C.get(a.view)??0;C.set(a.view,m+1);let h=m?`${a.view}-${m}`:a.view,v=[T("tab"),T("panel")],Y=s("button",{role:"tab",id:v[0],"aria-controls":v[1],test:`tab-${h}`,on:{click:()=>S(f)}},a.title||p?.title||a.view),y=s("div",{role:"tabpanel",id:v[1],"aria-labelledby":v[0],test:`view-${h}`,hidden:!0}),x=null;d.push({tab:Y,panel:y,mount(){if(!x){if(!p){y.append(s("p",{class:"error"},`This page knows no view named ${a.view}.`)),x=()=>y.replaceChildren();return}x=p.mount(y,{data:a.data??{},backend:r.backend,host:r.host,announce:E=>{V.textContent=E},dark:b})}},unmount:()=>x?.()})});let H=s("div",{class:"tabs",role:"tablist","aria-label":"Views",on:{keydown:a=>{let f=d.findIndex(({tab:m})=>m.getAttribute("aria-selected")==="true"),p={ArrowRight:f+1,ArrowLeft:f-1,Home:0,End:-1}[a.key];p!==void 0&&(a.preventDefault(),S((p+d.length)%d.length,!0))}}},...d.map(({tab:a})=>a));return H.hidden=d.length<2,i.addEventListener("change",w),o.append(s("div",{class:"page"},s("div",{class:"top"},H,g),...d.map(a=>a.panel)),V),w(),d.length&&S(0),()=>{i.removeEventListener("change",w);for(let a of d)a.unmount();t.remove()}}var R={name:"data",title:"Your data",mount(e){return e.append(s("p",{class:"note"},"This view is not built yet.")),()=>e.replaceChildren()}};var U={name:"database",title:"Database",mount(e,{data:r}){let n=r.answer?.rows??r.rows??[];return e.append(s("h2",{test:"answer-value"},String(r.answer?.value??"")),s("table",{},...n.map((t,o)=>s("tr",{},s("td",{class:"number",test:`row-${o}-weight`},$(t.weight??0)),s("td",{},String(t.key)),s("td",{},String(t.value)))))),()=>e.replaceChildren()}};var z={name:"model",title:"Model",mount(e){return e.append(s("p",{class:"note"},"This view is not built yet.")),()=>e.replaceChildren()}};var D={name:"regression",title:"Regression",mount(e){return e.append(s("p",{class:"note"},"This view is not built yet.")),()=>e.replaceChildren()}};var O={name:"scores",title:"Scores",mount(e){return e.append(s("p",{class:"note"},"This view is not built yet.")),()=>e.replaceChildren()}};var I={name:"sentence",title:"Sentence",mount(e){return e.append(s("p",{class:"note"},"This view is not built yet.")),()=>e.replaceChildren()}};var Z={u8:Uint8Array,u16:Uint16Array,i32:Int32Array,f32:Float32Array,f64:Float64Array};function _(e){return e instanceof ArrayBuffer?new Uint8Array(e):new Uint8Array(e.buffer,e.byteOffset,e.byteLength)}function u(e,r){if(Array.isArray(e))return e.map(t=>u(t,r));if(e===null||typeof e!="object")return e;if(typeof e.$=="number"){let t=_(r[e.$]).slice();return{data:new Z[e.dtype](t.buffer),shape:e.shape}}let n=Object.entries(e).map(([t,o])=>[t.startsWith("$")?t.slice(1):t,u(o,r)]);return Object.fromEntries(n)}function q(e){if(!e.send||!e.on)return null;let r=new Map,n=0;return e.on("msg:custom",(t,o=[])=>{let i=r.get(t.id);i&&(r.delete(t.id),"error"in t?i.fail(new Error(t.error)):i.done(u(t.result,o)))}),{call(t,o){n+=1;let i=n;return new Promise((l,c)=>{r.set(i,{done:l,fail:c}),e.send({id:i,call:t,args:o})})}}}function F(e){let r=atob(e),n=new Uint8Array(r.length);for(let t=0;t<r.length;t+=1)n[t]=r.charCodeAt(t);return n}function ee(e,r={}){return{async call(n,t){let o=await fetch(`${e}/call/${encodeURIComponent(n)}`,{method:"POST",headers:{"Content-Type":"application/json",...r},body:JSON.stringify(t)}),i=await o.json().catch(()=>({error:`status ${o.status}`}));if("error"in i)throw new Error(String(i.error));return u(i.result,(i.buffers??[]).map(F))}}}async function K(e){let n=new Blob([F(e)]).stream().pipeThrough(new DecompressionStream("gzip")),t=await new Response(n).arrayBuffer(),o=new DataView(t).getUint32(0,!0),i=JSON.parse(new TextDecoder().decode(new Uint8Array(t,4,o))),l=4+o,c=i.sizes.map(b=>(l+=b,new Uint8Array(t,l-b,b)));return{views:u(i.views,c)}}var M=[U,I,D,O,R,z];function te({model:e,el:r}){let n=()=>u(e.get("views"),e.get("buffers")??[]),t=q(e),o=k(r,{views:n(),backend:t,host:"notebook"},M),i=()=>{o(),o=k(r,{views:n(),backend:t,host:"notebook"},M)};return e.on?.("change:views",i),()=>{e.off?.("change:views",i),o()}}function re(e,r){return k(e,r,M)}async function ne(e){let{views:r}=await K(e.textContent??"");e.remove();let n=document.createElement("main");document.body.append(n),re(n,{views:r,backend:null,host:"file"})}if(import.meta.url===document.baseURI){let e=document.getElementById("qkv-page");e&&ne(e)}var Le={render:te};export{re as boot,Le as default,L as equation,ee as server,u as unpack};
