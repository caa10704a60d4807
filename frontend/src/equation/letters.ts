/** Text by its letters and by its words: the hashes of qkv.database.encoders.characters, lexical. */

const SPACE = 32;
const VOWELS = new Set(Array.from("aeiouy", (vowel) => vowel.charCodeAt(0)));
const PRIME = 16777619;

/** MurmurHash3's last step. */
export function scramble(code: number): number {
  code = Math.imul(code ^ (code >>> 16), 0x85ebca6b);
  code = Math.imul(code ^ (code >>> 13), 0xc2b2ae35);
  return (code ^ (code >>> 16)) >>> 0;
}

/** Python's casefold of one letter in NFKD. */
function folded(letter: string): string {
  if (letter === "ı") return letter;
  if (letter === "ẞ") return "ss";
  if (/[\u13a0-\u13fd\uab70-\uabbf]/.test(letter)) return letter.toUpperCase(); // Cherokee
  return letter.toUpperCase().toLowerCase().replaceAll("ς", "σ");
}

/** Text without case, accents, compatibility forms and punctuation, which becomes a space. */
export function plain(text: string): string {
  const ascii = /^[\x00-\x7f]*$/.test(text);
  const spread = ascii ? text : text.normalize("NFKD");
  let out = "";
  for (const letter of spread) {
    for (const x of ascii ? letter.toLowerCase() : folded(letter)) {
      if (/['’‘ʼ`´\u0300-\u036f]/.test(x)) continue;
      out += /[\p{P}\p{Z}\p{C}]/u.test(x) && !/[#&@%*]/.test(x) ? " " : x;
    }
  }
  return out;
}

/** The letters of a text, one space around and between its words. */
export function spelled(text: string): number[] {
  const letters = Array.from(` ${plain(text)} `, (x) => x.codePointAt(0)!);
  return letters.filter((x, i) => x !== SPACE || letters[i - 1] !== SPACE);
}

/** The same with all vowels alike, and a letter that is repeated once. */
function sounded(letters: number[]): number[] {
  const heard = letters.map((x) => (VOWELS.has(x) ? 97 : x));
  return heard.filter((x, i) => x !== heard[i - 1]);
}

/** The hash of every n-gram of the words, `least` to `most` letters long. */
function grams(letters: number[], [least, most]: [number, number], seed: number): number[] {
  const inside = letters.map((x) => x !== SPACE);
  const out: number[] = [];
  for (let start = 0; start < letters.length; start++) {
    let code = seed;
    let whole = true;
    for (let length = 1; length <= most && start + length <= letters.length; length++) {
      const last = start + length - 1;
      code = Math.imul(code ^ letters[last], PRIME);
      if (length > 2) whole &&= inside[last - 1];
      // An n-gram may begin or end with a word's border, but not reach across it, except by one
      // letter on each side, so that the order of words counts.
      const across = length === 3 && inside[start] && inside[last];
      const good = length === 1 ? inside[start] : length === 2 ? inside[start] || inside[last] : whole || across;
      if (good && length >= least) out.push(scramble(code));
    }
  }
  return out;
}

/** x_b = Σ_g ±w(g) over the n-grams g with hash(g) = b; then x / ‖x‖, in float32. */
export function characters(text: string, width = 256, n: [number, number] = [2, 3], sounds = 0.5): Float32Array {
  const out = new Float64Array(width);
  const put = (codes: number[], weight: number) => {
    for (const code of codes) out[Math.floor((code * width) / 2 ** 32)] += code & 1 ? weight : -weight;
  };
  const letters = spelled(text);
  put(grams(letters, n, 2166136261), 1);
  if (sounds) put(grams(sounded(letters), n, 84696351), Math.fround(sounds));
  const vector = Float32Array.from(out);
  const length = Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0)) || 1;
  return vector.map((x) => x / Math.fround(length));
}

/** The words of a text, by their hashes, and how often each is there. */
export function words(text: string): Map<number, number> {
  const out = new Map<number, number>();
  let [code, power, letters] = [0, 1, 0];
  for (const letter of [...spelled(text), SPACE]) {
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
