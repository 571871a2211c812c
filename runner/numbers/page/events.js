// The runner's server-sent events, also across its restarts.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 5000;

/**
 * Follows a stream for ever: `handlers` are called with the decoded data of each event by its name, `back` with the first
 * of a connection, `lost` once when it breaks.
 *
 * EventSource would try again by itself, but gives up for good where another program answers on the port meanwhile.
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
