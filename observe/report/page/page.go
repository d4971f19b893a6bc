// Package page writes a report as one HTML page.
//
// [Write] writes a file that holds styles, scripts, charts and data, and sends no
// requests. [Live] writes the page that a run under way serves; it sends requests to that
// run only.
//
// The data is compressed JSON. Each rank is a block of its own, which the page decodes
// when the user selects the rank.
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

	"github.com/stowage-dev/stowage/internal/pagestyle"
	"github.com/stowage-dev/stowage/observe/report"
)

//go:embed page.html css js uplot
var files embed.FS

// shell holds the values for page.html. All but the title come from this package.
type shell struct {
	Title   string
	Policy  string // the content security policy
	Served  bool
	Styles  template.HTML
	Scripts template.HTML
	Data    template.HTML
}

// Write writes a report as a page that needs no other file. It returns an error if the
// report holds a number that JSON cannot represent, or if w fails.
func Write(w io.Writer, r *report.Report) error {
	data, err := blocks(r)
	if err != nil {
		return fmt.Errorf("report page: %w", err)
	}
	return write(w, shell{Title: r.Title, Data: data})
}

// Live writes the page that a run under way serves. The page reads report.json beside it
// and listens to server-sent events at events: "report" says that the data has changed,
// "done" that it will not change any more.
func Live(w io.Writer) error {
	return write(w, shell{Title: "Stowage", Served: true})
}

func write(w io.Writer, s shell) error {
	styles, err := join("uplot/uPlot.css", "css/*.css")
	if err != nil {
		return err
	}
	styles = pagestyle.CSS() + styles
	library, err := join("uplot/LICENSE", "uplot/uPlot.js")
	if err != nil {
		return err
	}
	// The licence must go with every copy.
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

// join concatenates files.
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

// element wraps text of this package. A test checks that none of it ends the element.
func element(tag, text string) template.HTML {
	return template.HTML("<" + tag + ">" + text + "</" + tag + ">\n")
}

// hash returns the source expression that allows one element by its content.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// blocks returns the data: a block for each rank, and one for everything else.
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

// block writes a value as compressed JSON. Base64 keeps text of the data from being read
// as HTML.
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
