// Requests to the server that this page came from. Streams are read with fetch, since an EventSource
// cannot send a key.

const KEY = "jaxserve.key";

/** A refusal of the server, in its own words. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** The address of a route, also where the server lies behind a prefix. */
export const address = (path) => new URL(path, document.baseURI).href;

/** Ask for a route; a body makes it a POST. Raises ApiError. */
export async function ask(path, { body = null, signal = null, requestId = null } = {}) {
  const headers = {};
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  if (requestId) headers["X-Request-Id"] = requestId;
  if (body !== null) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? null : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // a proxy's own page: the status says enough
  }
  if (response.status === 401) document.dispatchEvent(new CustomEvent("key-wanted"));
  throw new ApiError(response.status, message, response.headers.get("Retry-After"));
}

/** The events of a streamed response, parsed; an error event is raised as ApiError. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = part.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
