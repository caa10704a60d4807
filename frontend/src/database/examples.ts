/** The four example tables. */

export type Cell = string | number | null;

export interface Example {
  name: string;
  title: string;
  /** What the two columns hold. */
  key: string;
  value: string;
  query: Cell;
  rows: [Cell, Cell][];
  note: string;
}

export const EXAMPLES: Example[] = [
  {
    name: "names",
    title: "Six names",
    key: "last name",
    value: "first name",
    query: "Lee",
    note: "An exact match finds the key or nothing. Attention finds similar keys: no key here is Lee.",
    rows: [
      ["Zhang", "Aston"],
      ["Lipton", "Zachary"],
      ["Li", "Mu"],
      ["Smola", "Alex"],
      ["Hu", "Rachel"],
      ["Werness", "Brent"],
    ],
  },
  {
    name: "majors",
    title: "Students and majors",
    key: "major",
    value: "student",
    query: "phychology",
    note: "To find people by major, the major must be the key. Keys may repeat, and typos are tolerated.",
    rows: [
      ["psychology", "John Doe"],
      ["mathematics", "Ada Byron"],
      ["aerospace engineering", "Mary Jackson"],
      ["literature", "Wang Wei"],
      ["psychology", "Amina Diallo"],
      ["architecture", "Sofia Rossi"],
      ["economics", "Kofi Mensah"],
      ["marine biology", "Ines Silva"],
    ],
  },
  {
    name: "salary",
    title: "GPA → salary",
    key: "GPA",
    value: "salary, in thousands",
    query: 3.5,
    note: "Values that are numbers are averaged, with more weight for near rows: Nadaraya–Watson regression.",
    rows: [
      [2.43, 71.3],
      [2.55, 66.9],
      [2.77, 70.6],
      [2.97, 62.7],
      [3.06, 70.6],
      [3.2, 71.3],
      [3.39, 79.8],
      [3.43, 76.0],
      [3.54, 77.2],
      [3.6, 82.2],
      [3.64, 81.7],
      [3.84, 89.6],
      [3.91, 86.2],
      [3.98, 92.1],
    ],
  },
  {
    name: "books",
    title: "Books",
    key: "title",
    value: "author",
    query: "the alchmist",
    note: "A title that is nearly right is enough.",
    rows: [
      ["The Odyssey", "Homer"],
      ["The Art of War", "Sun Tzu"],
      ["Beowulf", "Anonymous"],
      ["The Travels of Marco Polo", "Marco Polo"],
      ["The Prince", "Niccolò Machiavelli"],
      ["Don Quixote", "Miguel de Cervantes"],
      ["Wuthering Heights", "Emily Brontë"],
      ["War and Peace", "Leo Tolstoy"],
      ["Les Misérables", "Victor Hugo"],
      ["Treasure Island", "Robert Louis Stevenson"],
      ["The War of the Worlds", "H. G. Wells"],
      ["The Call of the Wild", "Jack London"],
      ["Peter Pan", "J. M. Barrie"],
      ["The Great Gatsby", "F. Scott Fitzgerald"],
      ["To the Lighthouse", "Virginia Woolf"],
      ["The Grapes of Wrath", "John Steinbeck"],
      ["The Little Prince", "Antoine de Saint-Exupéry"],
      ["I, Robot", "Isaac Asimov"],
      ["Waiting for Godot", "Samuel Beckett"],
      ["Silent Spring", "Rachel Carson"],
      ["The Godfather", "Mario Puzo"],
      ["Beloved", "Toni Morrison"],
      ["The Alchemist", "Paulo Coelho"],
      ["Wolf Hall", "Hilary Mantel"],
    ],
  },
];
