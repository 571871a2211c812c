// Receives the runner's server-sent events. Connects again when the runner restarts.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 5000;

/**
 * Follows a stream for ever. `handlers` maps the name of an event to a function that is called with the decoded data.
 * Calls `back` before the first event of each connection, and `lost` whenever a connection breaks or cannot be made.
 *
 * EventSource alone would connect again, but gives up for good if another program answers on the port meanwhile.
 */
export function follow(url, handlers, { back, lost }) {
  let source = null;
  let timer = 0;
  let wait = FIRST_WAIT_MS;
  let live = false;

  function open() {
    clearTimeout(timer);
    source = new EventSource(url);
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        const data = JSON.parse(event.data);
        if (!live) back();
        live = true;
        wait = FIRST_WAIT_MS;
        handle(data);
      });
    }
    source.addEventListener("error", broken);
  }

  function broken() {
    source.close();
    source = null;
    live = false;
    lost();
    timer = setTimeout(open, wait);
    wait = Math.min(wait * 1.5, LONGEST_WAIT_MS);
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && source === null) open();
  });
  open();
}
