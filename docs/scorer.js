/* How the search orders pages: those whose name or title has the words come first, then those that
   answer questions, then those that only name the words. Guides have further words that people use
   for what they explain. The numbers of points for titles and terms are those of Sphinx. */
const GUIDES = {
  installation: "install",
  quickstart: "loop",
  lightning: "",
  huggingface: "transformers trainer",
  networks: "ddp fsdp compile amp mixed precision accumulation",
  sinks: "wandb mlflow tensorboard",
  curvature: "hessian eigenvalue",
  "run-file": "checkpoint resume",
  "command-line": "compare runs",
  "diagnosis/loss-does-not-go-down": "spike flat",
  "diagnosis/outlier_sample": "outlier",
};
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().split(/\s+/).filter((word) => word.length > 2);
    const named = `${page} ${title} ${GUIDES[page] || ""}`.toLowerCase();
    const found = words.filter((word) => named.includes(word.slice(0, 6))).length;
    const share = found / Math.max(words.length, 1);
    const isAnswer = /^tutorials\/(mislabelled|learning_rate|batch_size|language_model|notebooks)$/;
    if (/^(glossary|index|gallery\/faults)$/.test(page)) return Math.min(score, 15) - 15;
    if (kind === "object" || page === "api") return score - 10;
    if (page === "diagnosis/loss-does-not-go-down") return score + 20 + 25 * share;
    if (page === "faq") return score + 11;
    if (/^(choosing|overhead)$/.test(page)) return score + 10 + 25 * share;
    if (isAnswer.test(page)) return score + 25 * share + (found ? 20 : 5);
    if (page in GUIDES) return score + 25 * share + (found ? 12 : 3);
    if (page.startsWith("diagnosis/")) return score + 25 * share + (found ? 8 : 2);
    return score + 25 * share;
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
