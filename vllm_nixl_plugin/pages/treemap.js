/* A treemap of weights, without any library: areas are bytes, nesting is the tree of modules.

   const map = nixlTreemap(element, leaves, options)

   element   an empty block with a height; it is filled, and drawn again when its size changes.
   leaves    [{path: "model.layers.0.mlp.down_proj.weight", nbytes: 1024, ...}]; other fields are the caller's own.
             Several leaves may have one path (a parameter on several ranks): they lie beside each other.
   options   colour(leaf)   a CSS colour
             lines(leaf)    lines of text for the tooltip, below path and bytes (optional)
             fill(leaf)     0 to 1: how much of the leaf is done, drawn as a bar from the left (optional)
             zoomed(path)   called with the path of the module that fills the map now (optional)
   map       update(leaves)   other leaves, or the same with other values; the zoom is kept
             redraw(options)  other options (merged), e.g. another colour
             zoom(path)       show one module ("" is the whole)

   Needs the rules of treemap.css. A module is clicked (or Enter pressed on it) to fill the map; the line above leads
   back. nixlTreemap.squarify, .tree and .bytes are pure, for other uses and for tests.

   `vllm-nixl plan --html` uses it with static data (trainer_client/commands/plan_page.py); a live page calls
   map.update at each answer of the server. In Python: vllm_nixl_plugin.pages.asset("treemap.js").
*/
"use strict";

const nixlTreemap = (() => {
  const HEADER = 17, GAP = 1, SMALLEST = 3, WITH_HEADER = 34;

  function bytes(n) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (n < 1000) return unit === "B" ? `${n} B` : `${n.toFixed(2)} ${unit}`;
      n /= 1000;
    }
    return `${n.toFixed(2)} TB`;
  }

  /* The tree of modules: {name, path, nbytes, children} or {name, path, nbytes, leaf}. A module with one child module
     is one node with both names. */
  function tree(leaves) {
    const root = { name: "", path: "", nbytes: 0, children: new Map() };
    for (const leaf of leaves) {
      if (!(leaf.nbytes > 0)) continue;
      const parts = leaf.path.split(".");
      let node = root;
      node.nbytes += leaf.nbytes;
      parts.forEach((name, depth) => {
        if (!node.children.has(name))
          node.children.set(name, {
            name, path: parts.slice(0, depth + 1).join("."), nbytes: 0, children: new Map(), leaves: [] });
        node = node.children.get(name);
        node.nbytes += leaf.nbytes;
      });
      node.leaves.push(leaf);
    }
    const settle = (node) => {
      const inner = [...node.children.values()].map(settle);
      const own = (node.leaves || []).map((leaf) => ({ name: node.name, path: node.path, nbytes: leaf.nbytes, leaf }));
      if (!inner.length && own.length === 1) return own[0];
      const children = [...inner, ...own];
      if (node.path && children.length === 1) return { ...children[0], name: `${node.name}.${children[0].name}` };
      return { name: node.name, path: node.path, nbytes: node.nbytes, children };
    };
    return settle(root);
  }

  /* Rectangles [{item, x, y, w, h}] that fill the given one, with areas in the ratio of item.nbytes and sides as equal
     as can be; the largest first, equal ones in their order. */
  function squarify(items, x, y, w, h) {
    const left = items.filter((item) => item.nbytes > 0).sort((a, b) => b.nbytes - a.nbytes);
    const placed = [];
    let total = left.reduce((sum, item) => sum + item.nbytes, 0);
    let next = 0;
    while (next < left.length && w > 0 && h > 0) {
      const short = Math.min(w, h), scale = (w * h) / total;
      let row = 0, end = next, worst = Infinity;
      while (end < left.length) {
        const sum = row + left[end].nbytes, side = (sum * scale) / short;
        const ratio = Math.max(
          (left[next].nbytes * scale) / (side * side), (side * side) / (left[end].nbytes * scale));
        if (ratio > worst) break;
        worst = ratio; row = sum; end += 1;
      }
      const thick = (row * scale) / short;
      let along = 0;
      for (; next < end; next += 1) {
        const length = (left[next].nbytes / row) * short;
        placed.push(w >= h ? { item: left[next], x, y: y + along, w: thick, h: length }
                           : { item: left[next], x: x + along, y, w: length, h: thick });
        along += length;
      }
      if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      total -= row;
    }
    return placed;
  }

  /* The innermost module that holds everything below a path. */
  function find(node, path) {
    for (const child of node.children || [])
      if (child.children && (path === child.path || path.startsWith(`${child.path}.`))) return find(child, path);
    return node;
  }

  function create(element, leaves, options) {
    let root = tree(leaves), shown = "";
    const trail = document.createElement("div"), area = document.createElement("div"), tip = document.createElement("div");
    trail.className = "nixl-trail"; area.className = "nixl-map"; tip.className = "nixl-tip"; tip.hidden = true;
    element.classList.add("nixl-treemap");
    element.replaceChildren(trail, area, tip);
    const cells = new Map();

    function zoom(path) {
      shown = path;
      draw();
      if (options.zoomed) options.zoomed(path);
    }

    function drawTrail() {
      const parts = shown ? shown.split(".") : [];
      trail.replaceChildren(...["all", ...parts].map((name, depth) => {
        const link = document.createElement("button");
        link.type = "button"; link.textContent = name; link.disabled = depth === parts.length;
        link.onclick = () => zoom(parts.slice(0, depth).join("."));
        return link;
      }));
    }

    function cell(node, { x, y, w, h }) {
      const box = document.createElement("div");
      box.className = node.leaf ? "nixl-leaf" : "nixl-module";
      box.style.cssText = `left:${x}px;top:${y}px;width:${Math.max(w - GAP, 1)}px;height:${Math.max(h - GAP, 1)}px`;
      cells.set(box, node);
      if (node.leaf) {
        box.style.background = options.colour(node.leaf);
        if (options.fill) {
          const bar = document.createElement("i");
          bar.style.width = `${100 * Math.min(Math.max(options.fill(node.leaf), 0), 1)}%`;
          box.append(bar);
        }
      } else { box.tabIndex = 0; box.setAttribute("role", "button"); box.setAttribute("aria-label", node.path); }
      if (w > 40 && h > 14) {
        const label = document.createElement("span");
        label.textContent = node.name;
        box.append(label);
      }
      return box;
    }

    function fillIn(parent, node, w, h) {
      const header = node.path !== shown && node.path ? (w > 40 && h > WITH_HEADER ? HEADER : 2) : 0;
      const edge = header ? 2 : 0;
      for (const place of squarify(node.children, edge, header, w - 2 * edge - GAP, h - header - edge - GAP)) {
        if (place.w < SMALLEST || place.h < SMALLEST) continue;
        const box = cell(place.item, place);
        parent.append(box);
        if (place.item.children) fillIn(box, place.item, place.w, place.h);
      }
    }

    function draw() {
      const node = find(root, shown);
      shown = node.path;
      cells.clear();
      area.replaceChildren();
      drawTrail();
      if (node.children && node.nbytes) fillIn(area, node, area.clientWidth, area.clientHeight);
    }

    const of = (event) => cells.get(event.target.closest(".nixl-leaf, .nixl-module"));
    const open = (node) => { if (node && node.children) zoom(node.path); };
    area.onclick = (event) => {
      const box = event.target.closest(".nixl-module");
      if (box) open(cells.get(box));
    };
    area.onkeydown = (event) => { if (event.key === "Enter") open(of(event)); };
    area.onmouseleave = () => { tip.hidden = true; };
    area.onmousemove = (event) => {
      const node = of(event);
      tip.hidden = !node;
      if (!node) return;
      const lines = [node.path, bytes(node.nbytes), ...(node.leaf && options.lines ? options.lines(node.leaf) : [])];
      tip.textContent = lines.join("\n");
      const at = element.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
      tip.style.left = `${Math.min(x + 12, Math.max(at.width - tip.offsetWidth - 4, 0))}px`;
      tip.style.top = `${y + 16}px`;
    };
    new ResizeObserver(draw).observe(area);
    draw();
    return {
      update(next) { leaves = next; root = tree(leaves); draw(); },
      redraw(changed) { options = { ...options, ...changed }; draw(); },
      zoom,
    };
  }

  return Object.assign(create, { squarify, tree, bytes });
})();
