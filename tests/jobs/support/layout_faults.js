// What is wrong with how a page is laid out, in words: the page is the only one in the frame.
function faults(page) {
  const found = [], box = e => e.getBoundingClientRect(), width = page.documentElement.clientWidth;
  if (page.documentElement.scrollWidth > width) found.push('it scrolls sideways');
  for (const e of page.querySelectorAll('section *')) {
    const card = box(e.closest('section')), r = box(e);
    if (r.width && (r.left < card.left - 0.5 || r.right > card.right + 0.5 || r.bottom > card.bottom + 0.5))
      found.push('out of its card: ' + e.textContent.slice(0, 40));
  }
  for (const e of page.querySelectorAll('h1, p, .tile > *, th, td'))
    if (e.scrollWidth > e.clientWidth + 1) found.push('longer than its place: ' + e.textContent.slice(0, 40));
  for (const e of page.querySelectorAll('section *')) {  // an empty one with a colour is a figure
    const style = getComputedStyle(e), coloured = style.backgroundColor != 'rgba(0, 0, 0, 0)';
    if (!e.textContent && coloured && style.printColorAdjust != 'exact')
      found.push('a printer leaves it out: ' + e.className);
  }
  for (const chart of page.querySelectorAll('svg')) {
    const texts = [...chart.querySelectorAll('text')].filter(e => box(e).width);
    if (box(chart).height < 150) found.push('a chart ' + box(chart).height + ' pixels high');
    texts.forEach((one, i) => {
      const r = box(one);
      if (r.height < 11) found.push('tiny: ' + one.textContent);
      for (const other of texts.slice(i + 1)) {
        const q = box(other), across = r.left < q.right && q.left < r.right;
        if (across && r.top + 2 < q.bottom && q.top + 2 < r.bottom)
          found.push('one over the other: ' + one.textContent + ', ' + other.textContent);
      }
    });
  }
  return found;
}
