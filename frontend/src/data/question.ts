/** A first question for a table: similar to a key, but equal to none. */

const MAX_LETTERS = 40;
/** Shorter words keep all their letters. */
const MIN_WORD_LETTERS = 5;

/** Removes the middle letter of the longest word, and writes the text in lower case. */
function misspell(text: string): string {
  const words = text.split(/\s+/).filter((word) => word);
  const longest = words.reduce((best, word) => (word.length > best.length ? word : best), "");
  if (longest.length < MIN_WORD_LETTERS || !/^\p{L}+$/u.test(longest)) return text;
  const letters = Array.from(longest);
  letters.splice(letters.length >> 1, 1);
  return words.map((word) => (word === longest ? letters.join("") : word)).join(" ").toLowerCase();
}

/** A question for these keys: a misspelled key, or a number between two keys; "" if there is none. */
export function suggestQuestion(keys: unknown[]): string {
  const numbers = [...new Set(keys.filter((key): key is number => typeof key === "number" && Number.isFinite(key)))];
  if (numbers.length > 1) return String(Number(((numbers[0] + numbers[1]) / 2).toPrecision(6)));
  if (numbers.length) return String(numbers[0]);
  const texts = keys.filter((key): key is string => typeof key === "string" && key.trim() !== "" && key.length <= MAX_LETTERS);
  const fuzzy = texts.find((text) => misspell(text) !== text);
  return fuzzy === undefined ? texts[0] ?? "" : misspell(fuzzy);
}
