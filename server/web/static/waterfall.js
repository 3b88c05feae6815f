export async function showRequest(id, place) { place.textContent = id; }
