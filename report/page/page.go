// Package page shows a report as one HTML file that needs nothing else: styles,
// scripts, charts and figures are inside, and it sends no request. A run under way
// serves the same page, which then asks that run, and nobody else, for its figures.
//
// This file owns the putting together: the scripts of js in the order of their names,
// the styles, and the figures as compressed JSON. Figures of a rank are a block of
// their own, which the page reads when somebody looks at that rank.
package page

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"strings"

	"github.com/stowage-dev/stowage/report"
)

//go:embed page.html css js uplot
var files embed.FS

// shell is what page.html is filled with. Everything in it but the title is ours.
type shell struct {
	Title   string
	Policy  string // of contents
	Served  bool
	Styles  template.HTML
	Scripts template.HTML
	Data    template.HTML
}

// Write writes a report as a page that stands alone.
func Write(w io.Writer, r *report.Report) error {
	data, err := blocks(r)
	if err != nil {
		return fmt.Errorf("report page: %w", err)
	}
	return write(w, shell{Title: r.Title, Data: data})
}

// Live writes the page that a run under way serves. It reads report.json beside it and
// listens to events there: an event "report" says that the figures have changed, an
// event "done" that they will not change any more.
func Live(w io.Writer) error {
	return write(w, shell{Title: "Stowage", Served: true})
}

func write(w io.Writer, s shell) error {
	styles, err := join("uplot/uPlot.css", "css/*.css")
	if err != nil {
		return err
	}
	library, err := join("uplot/LICENSE", "uplot/uPlot.js")
	if err != nil {
		return err
	}
	// The licence asks to go with every copy.
	if licence, code, ok := strings.Cut(library, "/*!"); ok {
		library = "/*\n" + licence + "*/\n/*!" + code
	}
	own, err := join("js/*.js")
	if err != nil {
		return err
	}
	own = "(() => {\n\"use strict\";\n" + own + "})();\n"

	rules := []string{
		"default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'",
		"style-src " + hash(styles), "script-src " + hash(library) + " " + hash(own),
	}
	if s.Served {
		rules = append(rules, "connect-src 'self'")
	}
	s.Policy = strings.Join(rules, "; ")
	s.Styles = element("style", styles)
	s.Scripts = element("script", library) + element("script", own)

	t, err := template.ParseFS(files, "page.html")
	if err != nil {
		return err
	}
	return t.Execute(w, s)
}

// join puts files one after the other.
func join(patterns ...string) (string, error) {
	var all strings.Builder
	for _, pattern := range patterns {
		names, err := fs.Glob(files, pattern)
		if err != nil {
			return "", err
		}
		for _, name := range names {
			text, err := files.ReadFile(name)
			if err != nil {
				return "", err
			}
			all.Write(text)
			all.WriteByte('\n')
		}
	}
	return all.String(), nil
}

// element is only for text of our own: a test sees that none of it ends the element.
func element(tag, text string) template.HTML {
	return template.HTML("<" + tag + ">" + text + "</" + tag + ">\n")
}

// hash allows one element by its content, so that a policy need not allow all.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// blocks are the figures: everything but what belongs to a rank, then each rank.
func blocks(r *report.Report) (template.HTML, error) {
	head := *r
	head.Runs = make([]report.Run, len(r.Runs))
	var all strings.Builder
	for i, run := range r.Runs {
		head.Runs[i] = run
		head.Runs[i].Ranks = make([]report.Rank, len(run.Ranks))
		for j, rank := range run.Ranks {
			head.Runs[i].Ranks[j] = report.Rank{
				Rank: rank.Rank, Budget: rank.Budget, Dropped: rank.Dropped, Memory: report.Memory{Peak: rank.Memory.Peak},
			}
			if err := block(&all, fmt.Sprintf("rank-%d-%d", i, j), rank); err != nil {
				return "", fmt.Errorf("%s, rank %d: %w", run.Name, rank.Rank, err)
			}
		}
	}
	err := block(&all, "report", head)
	return template.HTML(all.String()), err
}

// block compresses a value. Base64 keeps names of the data out of the page's grammar.
func block(w io.Writer, id string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	var small bytes.Buffer
	z := gzip.NewWriter(&small)
	if _, err := z.Write(text); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "<script type=\"text/plain\" id=%q>%s</script>\n", id, base64.StdEncoding.EncodeToString(small.Bytes()))
	return err
}
