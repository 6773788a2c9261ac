// How the search ranks its results. Reference pages and guides come before pages that mention everything.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => {
    if (/^(changelog|differences|status|design\/|guides\/tour|guides\/index|auto_gallery\/)/.test(docname)) return score - 12;
    if (/^(guides\/|datasets|tables|urls|zarr|redis|torches)/.test(docname)) return score + 4;
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
