/* How the search orders pages: those that answer a question come before those that only name its
   words. The numbers of points for titles and terms are those of Sphinx. */
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const isAnswer = /^tutorials\/(mislabelled|learning_rate|batch_size|language_model|notebooks)$/;
    const isGuide = /^(installation|quickstart|lightning|huggingface|networks|sinks|curvature)$/;
    if (page === "diagnosis/loss-does-not-go-down") return score + 20;
    if (isAnswer.test(page)) return score + 20;
    if (isGuide.test(page)) return score + 12;
    if (page.startsWith("diagnosis/")) return score + 8;
    if (kind === "object" || page === "api") return score - 10;
    if (/^(glossary|index|gallery\/faults)$/.test(page)) return score - 15;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
