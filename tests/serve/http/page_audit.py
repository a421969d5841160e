"""What a page must not do to its reader: elements beyond the window, and text too faint to read."""

from __future__ import annotations


def beyond(width: int) -> str:
    """A script that returns the elements, those in closed parts included, that go beyond a window of this width."""
    return """(() => {
  document.querySelectorAll('details').forEach(e => { e.open = true; });
  return [...document.body.querySelectorAll('*')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > WIDTH + 0.5);
  }).map(e => `${e.tagName} ${e.className} ${e.getBoundingClientRect().right}: ${e.textContent.slice(0, 40)}`);
})()""".replace("WIDTH", str(width))


# Texts whose contrast with what is behind them is below WCAG 2.2's level AA (1.4.3), which large text meets with less.
# https://www.w3.org/TR/WCAG22/#contrast-minimum
FAINT = """(() => {
  document.querySelectorAll('details').forEach(e => { e.open = true; });
  const parsed = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const behind = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(parsed(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map(c => c / 255).map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const e = node.parentElement;
    const style = getComputedStyle(e);
    if (!node.data.trim() || !e.getClientRects().length || style.visibility === 'hidden' || e.closest(':disabled')) continue;
    const back = behind(e);
    const ink = over(parsed(e instanceof SVGElement ? style.fill : style.color), back);
    const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    const name = `${e.tagName} ${e.className.baseVal ?? e.className}`;
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${name}: ${node.data.slice(0, 40)}`);
  }
  return [...new Set(found)];
})()"""
