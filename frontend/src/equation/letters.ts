/** Text as hashed n-grams of letters or as hashed words, as in qkv.database.encoders.characters and lexical. */

const SPACE = 32;
const VOWELS = new Set(Array.from("aeiouy", (vowel) => vowel.charCodeAt(0)));
const PRIME = 16777619;

/** The finalizer of MurmurHash3. */
export function scramble(code: number): number {
  code = Math.imul(code ^ (code >>> 16), 0x85ebca6b);
  code = Math.imul(code ^ (code >>> 13), 0xc2b2ae35);
  return (code ^ (code >>> 16)) >>> 0;
}

/** Python's casefold of one letter in NFKD. */
function casefold(letter: string): string {
  if (letter === "ı") return letter;
  if (letter === "ẞ") return "ss";
  if (/[\u13a0-\u13fd\uab70-\uabbf]/.test(letter)) return letter.toUpperCase(); // Cherokee
  return letter.toUpperCase().toLowerCase().replaceAll("ς", "σ");
}

/** Text without case, accents and compatibility forms, and with spaces in place of punctuation. */
export function normalizeText(text: string): string {
  const ascii = /^[\x00-\x7f]*$/.test(text);
  const decomposed = ascii ? text : text.normalize("NFKD");
  let out = "";
  for (const letter of decomposed) {
    for (const x of ascii ? letter.toLowerCase() : casefold(letter)) {
      if (/['’‘ʼ`´\u0300-\u036f]/.test(x)) continue;
      out += /[\p{P}\p{Z}\p{C}]/u.test(x) && !/[#&@%*]/.test(x) ? " " : x;
    }
  }
  return out;
}

/** The letters of a text, with one space before, between and after its words. */
export function wordLetters(text: string): number[] {
  const letters = Array.from(` ${normalizeText(text)} `, (x) => x.codePointAt(0)!);
  return letters.filter((x, i) => x !== SPACE || letters[i - 1] !== SPACE);
}

/** The letters with every vowel as `a`, and repeated letters once. */
function foldVowels(letters: number[]): number[] {
  const folded = letters.map((x) => (VOWELS.has(x) ? 97 : x));
  return folded.filter((x, i) => x !== folded[i - 1]);
}

/** The hashes of all n-grams of the words with `shortest` to `longest` letters. */
function hashNgrams(letters: number[], [shortest, longest]: [number, number], seed: number): number[] {
  const isLetter = letters.map((x) => x !== SPACE);
  const out: number[] = [];
  for (let start = 0; start < letters.length; start++) {
    let code = seed;
    let isWithinWord = true;
    for (let length = 1; length <= longest && start + length <= letters.length; length++) {
      const last = start + length - 1;
      code = Math.imul(code ^ letters[last], PRIME);
      if (length > 2) isWithinWord &&= isLetter[last - 1];
      // An n-gram may start or end with the space at a word's border, but not contain it. Exception:
      // one letter on each side of a space, so that the order of words counts.
      const joinsWords = length === 3 && isLetter[start] && isLetter[last];
      const counts = length === 1 ? isLetter[start] : length === 2 ? isLetter[start] || isLetter[last] : isWithinWord || joinsWords;
      if (counts && length >= shortest) out.push(scramble(code));
    }
  }
  return out;
}

/** x_b = Σ_g ±w(g) over the n-grams g with hash(g) = b; then x / ‖x‖, in float32. */
export function encodeCharacters(text: string, width = 256, n: [number, number] = [2, 3], sounds = 0.5): Float32Array {
  const out = new Float64Array(width);
  const addHashes = (codes: number[], weight: number) => {
    for (const code of codes) out[Math.floor((code * width) / 2 ** 32)] += code & 1 ? weight : -weight;
  };
  const letters = wordLetters(text);
  addHashes(hashNgrams(letters, n, 2166136261), 1);
  if (sounds) addHashes(hashNgrams(foldVowels(letters), n, 84696351), Math.fround(sounds));
  const vector = Float32Array.from(out);
  const length = Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0)) || 1;
  return vector.map((x) => x / Math.fround(length));
}

/** The hashes of the words of a text, with their counts. */
export function countWords(text: string): Map<number, number> {
  const out = new Map<number, number>();
  let [code, power, letters] = [0, 1, 0];
  for (const letter of [...wordLetters(text), SPACE]) {
    if (letter !== SPACE) {
      power = Math.imul(power, PRIME);
      code = (code + Math.imul(letter + 1, power)) | 0;
      letters += 1;
    } else if (letters) {
      const word = scramble(code);
      out.set(word, (out.get(word) ?? 0) + 1);
      [code, power, letters] = [0, 1, 0];
    }
  }
  return out;
}
