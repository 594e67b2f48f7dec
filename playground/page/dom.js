// Small helpers for elements and numbers.

// Create an element: el("button", { id: "x", onclick: f }, "text", child). Names with a dash become attributes.
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || !(name in element)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Format a number with up to four significant digits: 25.5, 0.0312, 1234.
export function number(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toString() : Number(value.toPrecision(4)).toString();
}

export function percent(fraction) {
  return `${(100 * fraction).toFixed(1)}\u202f%`;
}

// Call a function once its calls have paused for some milliseconds.
export function debounce(delay, callback) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...values), delay);
  };
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the text and copy it"; // the browser does not let a page write to the clipboard
  }
  setTimeout(() => (button.textContent = label), 2000);
}
