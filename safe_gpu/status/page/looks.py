"""How the page looks, and the script that says when it is old and loads it anew."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2329;--dim:#59636e;--line:#dde2e7;--soft:#f3f5f7;--track:#dfe4e9;
--full:#5b7fa6;--free:#1a7f37;--claimed:#1f5fa8;--idle:#8a5600;--drained:#83399a;--busy:#b3261e}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e3e7eb;--dim:#9aa5b0;--line:#2b3138;--soft:#1c2127;
--track:#2e353d;--full:#6d93bd;--free:#57c470;--claimed:#7ab4f5;--idle:#e0a83f;--drained:#d190e3;--busy:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px 20px 32px;max-width:1480px;background:var(--paper);color:var(--ink);
font:14px/1.45 system-ui,sans-serif;font-variant-numeric:tabular-nums}h1,h2,p,li{overflow-wrap:anywhere}
h1{font-size:20px;margin:0}h2{font-size:17px;margin:0}h3{font-size:14px;margin:20px 0 8px}p{margin:2px 0}
a{color:var(--claimed)}.dim,.made,footer,.axis{color:var(--dim)}
header{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:baseline;gap:0 20px}
.stale{color:var(--paper);background:var(--busy);padding:1px 7px;border-radius:4px;visibility:hidden;
animation:show 0s var(--after) forwards}.old .stale{visibility:visible}@keyframes show{to{visibility:visible}}
section{border-top:1px solid var(--line);margin-top:14px;padding-top:12px}.error{color:var(--busy)}
table{border-collapse:collapse;width:100%;margin-top:12px}caption{text-align:left;font-weight:600;padding:0 0 4px}
th,td{padding:3px 10px 3px 0;text-align:left;vertical-align:baseline;font-weight:400;white-space:nowrap}
thead th{color:var(--dim);font-size:12px;border-bottom:1px solid var(--line)}
tbody th{font-weight:600}tbody tr+tr>*{border-top:1px solid var(--soft)}
.user,.job,.command,.holders,td.gpus,.host{white-space:normal;overflow-wrap:anywhere;min-width:5em}
.wants,.starts,.until{white-space:normal}.user,.host,.command{min-width:7em}.starts{min-width:9em}
@media(min-width:901px){.queue .job{min-width:6em}.queue .wants{min-width:5em}}
.util,.temp,.claims,.waited,.planned,.waiting,.longest-wait,.mean-wait{text-align:right}
b{font-weight:600;color:var(--dim)}b::before{content:"\\25CF";margin-right:5px}b.free,b.display{color:var(--free)}
b.claimed,b.shared,b.share{color:var(--claimed)}b.idle,b.at-risk{color:var(--idle)}b.drained{color:var(--drained)}
b.busy,.late{color:var(--busy)}svg{background:var(--track);fill:var(--full)}
.bar{width:64px;height:8px;border-radius:2px;margin-right:8px}
.hours{display:block;width:100%;height:64px;border-radius:3px;background:var(--soft)}
.axis{display:flex;flex-wrap:wrap;justify-content:space-between;gap:8px;font-size:12px;white-space:nowrap}
ul{margin:8px 0;padding-left:18px}li{margin:2px 0}footer{margin-top:24px;font-size:12px}
@media(min-width:1400px){.bar{width:48px}
.parts{display:grid;grid-template-columns:minmax(0,3fr) minmax(0,2fr);gap:0 40px}}
@media(max-width:900px){body{padding:12px 12px 24px}.bar{width:44px}.gpus .temp{display:none}
table:not(.use),:not(.use)>tbody,:not(.use)>caption{display:block}
:not(.use)>thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
:not(.use)>tbody>tr{display:flex;flex-wrap:wrap;gap:0 10px;padding:4px 0 4px 30px}
:not(.use)>tbody>tr>*{border:0;padding:0;min-width:0;text-align:left}
:not(.use)>tbody>tr+tr{border-top:1px solid var(--line)}
:not(.use)>tbody th:first-child{margin-left:-30px;min-width:20px}
.user,.job,.command,.waited,.planned,.starts{order:2}.since,.until{order:4}
.queue .user,.queue .job{order:0}
:not(.use)>tbody>tr>td:empty{display:none}.since::before{content:"since "}.until::before{content:"until "}
.waited::before{content:"waited "}.planned::before{content:"planned "}.starts::before{content:"starts "}
.hosts .free::after{content:" free"}.waiting::after{content:" waiting"}.longest-wait::before{content:"longest "}}
@media(max-width:600px){tr::after,tr::before{content:"";order:1;flex-basis:100%}tr::before{order:3}
.use .bar{width:26px}.use td,.use th{padding-right:8px}}
"""

SCRIPT = """
const page = document.documentElement, made = +page.dataset.made, every = +page.dataset.every;
const look = () => page.classList.toggle("old", Date.now() / 1000 - made > 3 * every);
look();
setInterval(look, 5000);
setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  try { if (location.protocol == "file:" || (await fetch("", {method: "HEAD"})).ok) location.reload(); } catch {}
}, every * 1000);
"""
