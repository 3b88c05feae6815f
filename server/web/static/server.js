// Calls to the server that this page came from, with the API key if one was entered.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = document.getElementById("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function check(response) {
  if (response.ok) return response;
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error.message;
  } catch { /* not JSON: the status has to do */ }
  throw new ServerError(text, response.status);
}

/** The decoded answer of a GET; throws ServerError. */
export async function api(path) {
  return (await check(await fetch(path, { headers: headers() }))).json();
}

/** The text of a GET; throws ServerError. */
export async function text(path) {
  return (await check(await fetch(path, { headers: headers() }))).text();
}

/** POSTs a body and calls onEvent with each event's decoded data; returns the response's headers. */
export async function stream(path, body, signal, onHeaders, onEvent) {
  const response = await check(await fetch(path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  }));
  onHeaders(response.headers);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const frames = rest.split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) onEvent(JSON.parse(data));
    }
  }
}
